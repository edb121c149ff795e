"""The naive kernels, complete: one obvious loop nest each, after ``train_gpt2.c``.

Every speed-up is quoted against them.
"""
