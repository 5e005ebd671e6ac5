"""The interactive page of a sentence, as an HTML file and as a widget of notebooks, with one front end (`frontend/`).

`attention` computes the attention in every state of the open choices, `mathml` the equations; `description` makes a
description for JSON and a buffer of bytes of them; `render` bundles these with the front end into one HTML file, and
`widget` sends them to a notebook through anywidget.

In the front end, `mount(root, {description, buffer}, host)` draws the page and returns `{update({description, buffer}),
remove()}`. A host runs `do`: `host.do([[name, setting], ...])`, where a name may be a pattern (`a_3_0_*`) and a setting
is `{"set": "zero"}`, `{"set": "node", "from": "x_1_3"}` or `{"set": "state", "state": 1}`; `host.undo([name, ...])`
removes interventions (no names: all of them). The host then calls `update` with the new description.
"""
