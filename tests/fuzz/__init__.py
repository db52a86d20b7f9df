"""Inputs that no person wrote: coverage-guided fuzzing of what reads bytes of others.

`compare`  What targets share
`records`  What databases give back
`objects`  What stores give back beside databases, and files like that
`requests` What callers send by gRPC, the errors that clients get, texts that callers keep
`http`     What callers send by HTTP
`events`   What backends of event queues give back, and notifications of S3 stores
`files`    What people write, and encrypted payloads
`targets`  What is fuzzed, and which errors each may raise
`corpus`   Inputs that reached new code, a folder for each target; a set without superfluous ones
`__main__` `make fuzz`: atheris on one target or all

`tests/unit/test_fuzz_corpus.py` replays the corpus. A crash that fuzzing finds goes into the
corpus, and is repaired.
"""
