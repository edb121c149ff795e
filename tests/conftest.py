"""Before any test imports numba."""

import os
import signal

from hypothesis import settings

os.environ["NUMBA_NUM_THREADS"] = "4"  # the same bits on more threads than a machine has cores
os.environ["OMP_WAIT_POLICY"] = "passive"  # so that the surplus threads do not spin

for number in (signal.SIGINT, signal.SIGHUP):  # which nohup and a script's & leave ignored, here and in children
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

settings.register_profile("cpuopt", deadline=None, derandomize=True)  # a busy machine is slow, not wrong
settings.load_profile("cpuopt")
