"""Starts the ranks of a run, here and on other hosts, and ends all of them, whatever happens.

options.py   command line -> Launch, a frozen plan of what will be started
hosts.py     hostfile and filters            bind.py   cores of a rank            places.py   which rank am I under srun
or mpirun
runner.py    Launch -> exit code: signals, the report of what failed first (failure.py)
driver.py    the launcher's side: one agent per host, here or through ssh (ssh.py, export.py); they talk in frames
(frames.py)
mpi.py       instead: the command line of srun or mpirun
agent.py     on every host: starts and watches the ranks; reaper.py: no process outlives the run; store.py: their
meeting point
rank.py      first code of every rank

agent.py, rank.py and what they load (frames, reaper, bind, places) import neither torch nor deepc."""

from .options import Launch, add_arguments, plan
from .runner import run

__all__ = ["Launch", "add_arguments", "plan", "run"]
