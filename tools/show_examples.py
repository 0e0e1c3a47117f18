"""Have the examples of docstrings shown as code on the pages; as they stand, `>>>` would begin a quotation.

It is an extension of what reads the source for the reference: see `extensions` in mkdocs.yml.
"""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class ShowExamples(griffe.Extension):
    """Puts a fence around every example: from `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called for everything that has a docstring, and all else."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
