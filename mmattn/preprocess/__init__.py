"""What happens to an input before a model sees it, the same in training, inference and export.

`image.ImageReader` turns a picture into pixels, `text.Tokenizer` a sentence into ids. Import them from their
modules; this package imports nothing by itself, so reading images never loads a tokenizer and the other way round.
"""
