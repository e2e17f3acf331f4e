"""Programs that write in typical ways. Each changes a folder that has a user's files in it.

`python -m programs.writers NAME...` trains a step on whatever device there is, and lets these
writers change the working directory. Each checks that it reads back what it wrote.
"""
