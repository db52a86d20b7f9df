"""Inputs that no person wrote: coverage-guided fuzzing of everything that reads bytes of others.

`compare`  What is wrong with a target that returns
`records`  What stores give back
`requests` What callers send, by gRPC and by HTTP, and the answers that clients get
`events`   What backends of event queues give back, and notifications of S3 stores
`files`    What people write, and encrypted payloads
`targets`  What is fuzzed, and which errors each may raise
`corpus`   Inputs that reached new code, a folder for each target; a set without superfluous ones
`__main__` `make fuzz`: atheris on one target or all

`tests/unit/test_fuzz_corpus.py` replays the corpus. A crash that fuzzing finds goes into the
corpus, and is repaired.
"""
