#!/bin/bash
# Runs a launcher (accelerate launch, torchrun) on a node so that USR1 stops the training in time: every training process
# finishes its step and saves, and ends by itself.
#
#   bash scripts/slurm/stoppable.sh accelerate launch ... pretrain/main.py ...
#
# SLURM sends USR1 to every process of a step at once, and Python dies of it unless told otherwise; told SIGTERM, a launcher
# gives its processes 30 s and kills them. So the launcher ignores USR1, and this script, which does not, tells SIGTERM to the
# training processes alone, the launcher's children (to those that have met USR1 already it is no second signal); when they are
# done it ends the launcher, which might start them again.
#
# Preemption, where the cluster does not send --signal's USR1 before it, is SIGTERM to every process of the step, this script
# too. When it ends, SLURM kills what is left of the step: so it stays until all that the launcher started has ended.
set -um # -m: the launcher has a process group of its own

(trap '' USR1 && exec "$@") &
launcher=$!

stop() {
    local children child
    children=$(cat "/proc/$launcher/task/"*/children 2>/dev/null)
    for child in $children; do
        kill -TERM "$child" 2>/dev/null # fails where it has ended since
    done
    for child in $children; do
        while kill -0 "$child" 2>/dev/null; do sleep 0.1; done
    done
    kill -TERM "$launcher" 2>/dev/null
}
trap stop USR1
trap : TERM

wait "$launcher"
status=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal ends the waiting, not the launcher
    wait "$launcher"
    status=$?
done
while kill -0 -- "-$launcher" 2>/dev/null; do sleep 0.1; done # the launcher may have ended before its processes
exit "$status"
