"""Lightning callbacks for honest training runs, and the checkpoint engine under them.

Nothing of Lightning is imported here: a writer process that imports the engine must start in a moment.
"""

__version__ = "0.1.0"
