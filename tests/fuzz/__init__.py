"""Inputs that no person wrote: coverage-guided fuzzing of everything that reads bytes of others.

`targets`  What is fuzzed, and which errors each may raise
`corpus`   Inputs that reached new code, a folder for each target; they grow in the repository
`__main__` `make fuzz`: atheris on one target or all

`tests/unit/test_fuzz_corpus.py` replays the corpus. A crash that fuzzing finds goes into the
corpus, and is repaired.
"""
