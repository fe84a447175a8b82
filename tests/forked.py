"""Starts a script on several processes, as torchrun does, but forks them from one that has imported what takes seconds.

python forked.py PROCESSES SCRIPT ARGUMENT...

The script is imported here first, as a module of another name, so that its processes find its imports done.
"""

import os
import runpy
import signal
import sys
import traceback
from types import FrameType


def become(rank: int, processes: int, port: int) -> None:
    """One of them: runs the script, and never returns."""
    code = 0
    try:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ.update({name: str(value) for name, value in places.items()})
        # The store is the first process's: the port is read once it is there.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.read(port, 8).decode(), TORCHELASTIC_USE_AGENT_STORE="True")
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    processes = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="imported")
    from torch.distributed import TCPStore

    running: dict[int, int] = {}  # and where each reads its port

    def end(*_: int | FrameType | None) -> None:
        for process in running:
            os.kill(process, signal.SIGTERM)
        os._exit(1)

    for rank in range(processes):
        reading, writing = os.pipe()
        if not (process := os.fork()):
            become(rank, processes, reading)
        running[process] = writing
    signal.signal(signal.SIGTERM, end)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its thread starts after the forks
    for writing in running.values():
        os.write(writing, str(store.port).encode())
    while running:
        process, status = os.wait()
        del running[process]
        if status:
            end()  # the others would wait for it
    return 0


if __name__ == "__main__":
    sys.exit(main())
