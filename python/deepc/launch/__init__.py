"""Starts the ranks of a run on this machine and ends all of them, whatever happens. Stands on torch elastic.

options.py   command line -> Launch, a frozen plan of what will be started
runner.py    Launch -> exit code: elastic agent, signals, the report of what failed first
reaper.py    no process outlives the run
rank.py      first code of every rank; imports neither torch nor deepc"""

from .options import Launch, add_arguments, plan
from .runner import run

__all__ = ["Launch", "add_arguments", "plan", "run"]
