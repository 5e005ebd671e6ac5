"""The interactive page of a sentence, as an HTML file and as a notebook widget; both use the same code in `frontend/`.

`description` computes the attention for every state of the latent choices, and collects it, the graph and the
contributions in a description for JSON and a buffer of bytes. `html` renders the equations and bundles all with the
front end into one HTML file; `widget` sends them to a notebook through anywidget, and checks the view that Python sets.

In the front end, `mount(root, {description, buffer}, host)` draws the page and returns `{update({description, buffer}),
getState(), setState(state), select(name), remove()}`. The state of the view is the selected node and the settings that
differ from the initial ones; `host.handleState(state)` receives it after each change. A host may also run `do`:
`host.do([[name, setting], ...])`, where a name may be a pattern (`a_3_0_*`) and a setting is `{"set": "zero"}`,
`{"set": "node", "from": "x_1_3"}` or `{"set": "state", "state": 1}`. `host.undo([name, ...])` removes interventions, or
all interventions if the list is empty. The host then calls `update` with the new description. Such a host may also have
`renderSections(description, names)`, which returns elements for the panel of the selected nodes or of the sentence.
"""
