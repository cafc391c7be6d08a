"""How OpenMP threads wait for each other; imported before torch, which loads the OpenMP library.

GNU's OpenMP lets a thread spin for about 300,000 rounds before it sleeps. When other programs use the same cores, a spinning
thread takes the time of the one that it waits for, and training slows down many times over. With 3,000 rounds an idle machine
is as fast as before, and a busy one much faster: `python benchmarks/openmp.py` prints the measurement.
"""

import os

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():  # what the user says, goes
    os.environ["GOMP_SPINCOUNT"] = "3000"
