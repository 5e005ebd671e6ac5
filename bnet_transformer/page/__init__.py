"""The interactive page of a sentence, and the widget: one front end, plain ES modules in `frontend/`.

`data` makes a small JSON-able description and one block of bytes from a sentence; `page` writes the self-contained
HTML. In the front end `mount(root, {description, buffer}, host)` draws both the page and the
widget; it returns `{update({description, buffer}), remove()}`. A host makes `do` live: `host.do([[name, setting], ...])` where
a name may be a pattern (`a_3_0_*`) and a setting is `{"set": "zero"}`, `{"set": "node", "from": "x_1_3"}` or
`{"set": "state", "state": 1}`; `host.undo([name, ...])` takes back what was set (no names: all of it). The host then
calls `update` with the new description.
"""
