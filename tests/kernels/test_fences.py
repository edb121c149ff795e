"""Fences around an array: a process that touches the page beyond its end or before its beginning is ended."""

from verbs import process

TRIED = """
import ctypes, os
import numpy as np
from cpuopt.check.fences import Fenced
def lives(at_end, only_read, at, write):
    x = Fenced(np.arange(5, dtype=np.float32), at_end, only_read)
    place = ctypes.c_float.from_address(x.array.ctypes.data + 4 * at)
    if not os.fork():
        if write:
            place.value = 1
        os._exit(7 if place.value >= 0 else 8)
    return os.waitpid(-1, 0)[1] >> 8 == 7
for at_end, edge in ((True, 5), (False, -1)):
    for only_read in (True, False):
        assert lives(at_end, only_read, 0, False) and lives(at_end, only_read, 4, False)
        assert not lives(at_end, only_read, edge, False), "read beyond"
        assert lives(at_end, only_read, 2, True) != only_read, "written"
print("as they should")
"""


def test_reads_beyond_an_array_and_writes_to_an_input_end_the_process() -> None:
    done = process(code=TRIED)
    assert done.stdout == "as they should\n", done.stderr
