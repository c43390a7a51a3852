"""Conversations: the forms that records have, and the template that turns them into tokens with exact labels.

conversation.py   a conversation and the forms of records that hold one
template.py       a chat template, which worker processes render
pool.py           these processes, and the limits of what a template may compute
worker.py         one of them
sandbox.py        a template in its sandbox, as transformers runs it: in a worker only
turns.py          where the assistant's turns stand in a rendered text: in a worker only
training.py       templates of our own, for families whose template drops text of earlier turns
stops.py          the symbols that close the assistant's turns
learned.py        the template that a model has learned, and the tokens that end its texts
render.py         ids and labels of a conversation; the prompt of the next turn
options.py        the options of `genesis data prepare`
"""
