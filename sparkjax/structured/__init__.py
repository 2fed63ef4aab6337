"""Answers that follow a grammar: JSON Schema, regular expressions, choices, Lark, tool calls.

What a request asks for becomes the text of one Lark grammar (`schema`, `sources`, `tools`), which
`vet` judges within limits of time and memory in a process of its own. The text travels in the
journal; every rank compiles it (`grammars`) and walks it along the committed tokens (`matcher`), so
that all ranks hold the same masks. The grammars are run by llguidance.
"""
