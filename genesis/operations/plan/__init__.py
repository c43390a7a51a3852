"""What a run needs before it starts: memory by rank and moment, time, money and disk. Nothing is allocated.

content.py      the files and options of a recipe of `genesis fit` -> one mapping, without Lightning
recipe.py       the mapping -> what the plan needs of it
layout.py       how a strategy spreads a model over ranks: pure values
state.py        parameters, gradients and optimizer states of a rank, in bytes
sections.py     the embedding, the blocks and the head, measured on the model's own code
record.py       when storages begin and end to exist
stand_ins.py    kernels and ranks that a plan does not have
other_models.py what runs beside the model: a teacher, the answers to prompts
timeline.py     plays a step: rest, forward, backward, step, save -> the bill
host.py         memory of the host: staging, offload, pinned buffers
remedies.py     which changes make a layout fit, ordered by their cost in speed
bandwidths.py   measured by the doctor, given or assumed
speed.py        tokens per second, by a measured rate or an assumed MFU
cost.py         hours, energy, money; spot against on-demand
checkpoints.py  bytes, disk, and the interval that loses least
report.py       all of it as plain JSON
"""
