"""The `deepspeed` import name over deepc: `import deepc.compat.deepspeed`, then scripts that import deepspeed run
unchanged.

names.py is the table of all modules and names; finder.py makes modules of it; the other files hold what is DeepSpeed's
habit only.
"""
