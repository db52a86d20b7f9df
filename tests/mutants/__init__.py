"""Small changes of the code that decides, one at a time: a test must fail by each.

`source`    where the code can be changed, and how
`__main__`  tries a random sample of the changes on a copy of the tree, and lists what survives
"""
