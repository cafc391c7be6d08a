"""How OpenMP threads wait for each other; imported before torch, which loads the OpenMP library.

GNU's OpenMP lets a thread spin for about 300,000 rounds before it sleeps. When other programs use the same cores, the loader's
readers among them, a spinning thread takes the time of the one that it waits for, and training slows down many times over.

3,000 rounds are a choice between two losses, measured on 2 cores of an Intel Xeon.
- The model alone (`python benchmarks/openmp.py --rounds 2`): 202 against 278 images/s on an idle machine, 146 against 70
  beside two busy programs.
- Training on the digits with two readers (`GOMP_SPINCOUNT=... python pretrain/main.py --num_steps 60`, twice each in turn):
  453 against 409 images/s.
"""

import os

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():  # what the user says, goes
    os.environ["GOMP_SPINCOUNT"] = "3000"
