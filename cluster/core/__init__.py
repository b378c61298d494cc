"""Block keys, paired KV pools and the scheduling of requests over them. Pure: the standard library and nothing else.

keys.py          what a block is called: key streams of any span, reuse scopes, raw block keys
runs.py          the nodes of a prefix tree, and how a stream is matched against them
prefix_tree.py   published blocks of one pool: match, publish, evict
eviction.py      in which order cached blocks are given up
block_pool.py    one fixed pool of blocks: free list, eviction on demand, meters
holding.py       what one request holds in one pool: block table, cursor
handle.py        what one request holds in all of them
paired_cache.py  the pools as one transaction: probe, claim, reserve, commit, revert, suspend, free
frontier.py      how deep pools hold a prompt, and what the cluster is told about it
ledger.py        what changed in the trees since the last report
invariants.py    what must hold at any time, checked from scratch
request.py       a request on its way; sampling.py its parameters, stop.py its stop strings
draft_length.py  how many tokens to draft: fixed, or by acceptance and load
batch_plan.py    what a step consists of
step_builder.py  builds one step: who runs, on whose blocks
admission.py     queue, ranks, preemption, the end of a request
"""
