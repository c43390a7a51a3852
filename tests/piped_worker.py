"""A worker over a pipe (`genesis.base.processes.PipedWorker`) in a forked process: MODULE DESCRIPTOR."""

import importlib
import sys

if __name__ == "__main__":
    module, descriptor = sys.argv[1:]
    importlib.import_module(module).main(int(descriptor))
