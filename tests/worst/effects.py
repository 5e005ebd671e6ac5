"""Sweeps, circuits, heads."""

# ruff: noqa: E501

ROWS = {
    "circuit": [
        (
            'bt.circuit(clean, corrupt, metric={"y_2": ("cat", "sat")}, threshold=nan)',
            "BNetError: threshold: expected a finite number",
        ),
        (
            'bt.circuit(clean, corrupt, metric={"y_2": ("cat", "sat")}, threshold=-1)',
            "BNetError: threshold: expected a number of at least 0",
        ),
        (
            'bt.circuit(clean, corrupt, metric={"y_2": ("cat", "dog")}, threshold=0.1)',
            "EvidenceError: y_2: expected one of its labels",
        ),
        (
            'bt.circuit(clean, corrupt, metric={"y_9": ("cat", "sat")}, threshold=0.1)',
            "UnknownNameError: node: expected a node y_word",
        ),
        ("bt.circuit(clean, corrupt, metric={}, threshold=0.1)", "BNetError: metric: expected one node and its state"),
        (
            "bt.circuit(clean, corrupt, metric=None, threshold=0.1)",
            "BNetError: metric: expected a mapping {node: state or (state, other state)}, or a function whose parameters are names of nodes",
        ),
        (
            'bt.circuit(clean, clean, metric={"y_2": ("cat", "sat")}, threshold=0.1).kept',
            "BNetError: corrupt: expected a sentence that differs from clean in what leads to the metric, along candidates",
        ),
        (
            'bt.circuit("the cat", "cat the", metric={"y_2": ("cat", "sat")}, threshold=0.1)',
            "BNetError: clean: expected a Sentence, or a list of them",
        ),
        (
            'bt.circuit([], [], metric={"y_2": ("cat", "sat")}, threshold=0.1)',
            "BNetError: clean: expected a Sentence, or a list of them",
        ),
        (
            'bt.circuit([clean], [corrupt, corrupt], metric={"y_2": ("cat", "sat")}, threshold=0.1)',
            "BNetError: corrupt: expected as many sentences as clean, 1",
        ),
        (
            'bt.circuit(clean, dec.sentence("the cat"), metric={"y_1": ("cat", "sat")}, threshold=0.1)',
            "BNetError: corrupt: expected sentences of 3 words, as clean",
        ),
        (
            'bt.circuit(clean, corrupt, metric={"y_2": ("cat", "sat")}, threshold=0.1, over=["layer"])',
            "BNetError: over: expected one of the allowed values",
        ),
        (
            'bt.circuit(clean, corrupt, metric={"y_2": ("cat", "sat")}, threshold=0.1, candidates="zz")',
            "UnknownNameError: arrow of candidates: expected a known name",
        ),
        (
            'bt.circuit(clean, corrupt, metric={"y_2": ("cat", "sat")}, threshold=0.1, memory=0)',
            "BNetError: memory: expected a whole number of at least 1",
        ),
        (
            'bt.circuit(clean, corrupt, metric={"y_2": ("cat", "cat")}, threshold=0.1)',
            "BNetError: metric of y_2: expected two different states",
        ),
        (
            'bt.circuit(s, s, metric={"y_2": ("cat", "sat")}, threshold=0.1)',
            "ReadingError: circuit below c: expected random nodes above the metric that are set",
        ),
        (
            "bt.circuit(clean, corrupt, metric=lambda y_9: y_9, threshold=0.1)",
            "UnknownNameError: node: expected a node y_word",
        ),
        (
            'bt.circuit(clean, corrupt, metric=lambda y_2: "a", threshold=0.1)',
            "BNetError: metric: expected a number for each of 1 examples",
        ),
    ],
    "inclusion": [
        ('bt.inclusion(None, ["the cat"])', "BNetError: net: expected a net"),
        (
            'bt.inclusion(net, ["the cat"])',
            "BNetError: net: expected heads that are summed: a plate of them that a later node reads",
        ),
        (
            "bt.inclusion(dec, [])",
            "BNetError: sentences: expected a list of sentences, or of pairs of them and what is observed; an array [sentence, word]",
        ),
        (
            'bt.inclusion(dec, "the cat")',
            "BNetError: sentences: expected a list of sentences, or of pairs of them and what is observed; an array [sentence, word]",
        ),
        (
            'bt.inclusion(dec, ["the dgo"])',
            "UnknownNameError: sentences[0], word of the sentence: expected a known name",
        ),
        ('bt.inclusion(dec, ["the cat"], method="gibbs")', "BNetError: method: expected one of the allowed values"),
        ('bt.inclusion(dec, ["the cat"], sigma=0)', "BNetError: sigma: expected a finite number above 0"),
        ('bt.inclusion(dec, ["the cat"], sigma=nan)', "BNetError: sigma: expected a finite number above 0"),
        ('bt.inclusion(dec, ["the cat"], output="zz")', "UnknownNameError: family: expected a known name"),
        ('bt.inclusion(dec, ["the cat"], interval=1)', "BNetError: interval: expected a probability between 0 and 1"),
        ('bt.inclusion(dec, ["the cat"], draws=0)', "BNetError: draws: expected a whole number of at least 1"),
        (
            'bt.inclusion(dec, ["the cat"], budget=1)',
            "BudgetError: method='exact': expected at most 1 runs of each slice",
        ),
        ('bt.inclusion(dec, ["the cat"], seed=2**63)', "BNetError: seed: expected a whole number below 2^63"),
        ('bt.inclusion(dec, ["the cat"], seed=-1)', "BNetError: seed: expected a whole number of at least 0"),
        ('bt.inclusion(dec, ["the cat"], memory=0)', "BNetError: memory: expected a whole number of at least 1"),
        ('bt.inclusion(dec, ["the cat"], role="zz")', "UnknownNameError: role of heads: expected a known name"),
        (
            'bt.inclusion(dec, ["the cat"], rounds=0, method="svi")',
            "BNetError: rounds: expected a whole number of at least 3",
        ),
        ('bt.inclusion(dec, ["the cat"], progress="yes")', "BNetError: progress: expected one of the allowed values"),
        ('bt.inclusion(dec, ["the cat"], draws=10**15)', "BudgetError: 1000000000000000 draws: expected at most"),
        (
            'torch.no_grad()(bt.inclusion)(dec, ["the cat"], draws=5)',
            "works: importance has gradients, whoever calls it",
            "found.sentences == 1",
        ),
    ],
    "inference.damage": [
        ("inference.damage(None)", "BNetError: damage: expected what bt.inclusion found"),
        (
            "inference.damage(held, [])",
            "BNetError: sentences: expected a list of sentences, or of pairs of them and what is observed; an array [sentence, word]",
        ),
        (
            "inference.damage(held, counts=[0])",
            "works: with none off, nothing is lost",
            "float(found.values.abs().max()) < 1e-6",
        ),
        ("inference.damage(held, counts=[99])", "BNetError: counts: expected at most the 2 heads that there are"),
        ('inference.damage(held, counts="all")', "BNetError: counts: expected numbers of heads that are off"),
        (
            'inference.damage(held, ["the dgo"])',
            "UnknownNameError: sentences[0], word of the sentence: expected a known name",
        ),
        ("inference.damage(held, counts=[])", "BNetError: counts: expected numbers of heads that are off"),
        ("inference.damage(held, counts=[1, 1]).to_dataframe()", "works: as told, twice", "len(found) == 2"),
    ],
    "roles": [
        ('bt.roles(None, ["the cat"])', "BNetError: net: expected a net"),
        ('bt.roles(dec, ["the cat"], draws=10**12)', "BudgetError: 1000000000000 draws: expected at most"),
        ("bt.roles(dec, [])", "BNetError: sentences: expected a list of sentences, at least one"),
        ('bt.roles(dec, "the cat")', "BNetError: sentences: expected a list of sentences, at least one"),
        ('bt.roles(dec, ["the cat"], relations=["zz"])', "UnknownNameError: relation: expected a known name"),
        ('bt.roles(dec, ["the cat"], relations=[])', "BNetError: relations: expected at least one beside 'other'"),
        (
            'bt.roles(dec, ["the cat"], relations=["same", "same"])',
            "works: a relation counts once",
            "found.relations == ('same', 'other')",
        ),
        (
            'bt.roles(dec, ["the cat"], relations={"a": lambda words: [[1.0]]})',
            "BNetError: relation 'a', sentence 0: expected a table of booleans of shape (2, 2)",
        ),
        (
            'bt.roles(dec, ["the cat"], relations={"other": "same"})',
            "BNetError: relations: expected a name for each relation; 'other' is what no relation holds of",
        ),
        ('bt.roles(dec, ["the cat"], slices=9)', "BNetError: slices: expected numbers from 0 to 0"),
        ('bt.roles(dec, ["the cat"], unit="text")', "BNetError: unit: expected one of the allowed values"),
        ('bt.roles(dec, ["the cat"], alpha=0)', "BNetError: alpha: expected a finite number above 0"),
        ('bt.roles(dec, ["the cat"], alpha=nan)', "BNetError: alpha: expected a finite number above 0"),
        ('bt.roles(dec, ["the cat"], interval=0)', "BNetError: interval: expected a finite number above 0"),
        ('bt.roles(dec, ["the cat"], draws=0)', "BNetError: draws: expected a whole number of at least 1"),
        ('bt.roles(dec, ["the cat"], seed=2**63)', "BNetError: seed: expected a whole number below 2^63"),
        ('bt.roles(dec, ["the cat"], seed=-1)', "BNetError: seed: expected a whole number of at least 0"),
        ('bt.roles(dec, ["the cat"], separators="the")', "BNetError: separators: expected a list of tokens"),
        (
            'bt.roles(dec, ["the cat"], separators=["zz"])',
            "UnknownNameError: token of separators: expected a known name",
        ),
        ('bt.roles(dec, ["the cat"], role="zz")', "UnknownNameError: role that reads: expected a known name"),
        ('bt.roles(vp, ["the cat"])', "BNetError: net: expected a TPM with P(j | i) in its slices"),
    ],
    "inference.Inclusion.duplicates": [
        ("held.duplicates(nan)", "BNetError: nats: expected a finite number above 0"),
        ("held.duplicates(-1)", "BNetError: nats: expected a finite number above 0"),
        ('held.duplicates("1")', "BNetError: nats: expected a finite number above 0"),
        ("held.duplicates(None)", "BNetError: nats: expected a finite number above 0"),
        ("held.duplicates(inf)", "BNetError: nats: expected a finite number above 0"),
        ("held.duplicates(0)", "BNetError: nats: expected a finite number above 0"),
    ],
    "inference.Inclusion.measure": [
        ('held.measure("zz")', "BNetError: measure: expected a measure of heads"),
        ("held.measure(None)", "BNetError: measure: expected a measure of heads"),
        ('held.measure("")', "BNetError: measure: expected a measure of heads"),
        ("held.measure(3)", "BNetError: measure: expected a measure of heads"),
        ('held.measure("Rho")', "BNetError: measure: expected a measure of heads"),
    ],
    "inference.Inclusion.place": [
        ('held.place("zz")', "UnknownNameError: slice of heads: expected a known name"),
        ("held.place(3)", "UnknownNameError: slice of heads: expected a known name"),
        ('held.place("")', "UnknownNameError: slice of heads: expected a known name"),
        ('held.place("a")', "UnknownNameError: slice of heads: expected a known name"),
        ("held.place(None)", "UnknownNameError: slice of heads: expected a known name"),
        ('held.place("a_9")', "UnknownNameError: slice of heads: expected a known name"),
    ],
    "inference.heads.Roles.heads_that_read": [
        ('told.heads_that_read("zz")', "UnknownNameError: relation: expected a known name"),
        ('told.heads_that_read("same", 2)', "works: no share is above 1", "found == ()"),
        ('told.heads_that_read("same", nan)', "BNetError: least: expected a finite number"),
        ("told.heads_that_read(None)", "UnknownNameError: relation: expected a known name"),
        ('told.heads_that_read("same", "half")', "BNetError: least: expected a finite number"),
        ('told.heads_that_read("Same")', "UnknownNameError: relation: expected a known name"),
    ],
    "inference.heads.Roles.of_role": [
        ("told.of_role(torch.zeros(9))", "BNetError: values: expected a tensor of shape (1, 2, 6)"),
        ("told.of_role(None)", "BNetError: values: expected a tensor of shape (1, 2, 6)"),
        ("told.of_role(told.mean[0])", "BNetError: values: expected a tensor of shape (1, 2, 6)"),
        ('told.of_role("mean")', "BNetError: values: expected a tensor of shape (1, 2, 6)"),
        ("told.of_role(torch.zeros(1, 2, 9))", "BNetError: values: expected a tensor of shape (1, 2, 6)"),
    ],
    "sweep": [
        ('bt.sweep(clean, corrupt, metric={"y_9": ("cat", "sat")})', "UnknownNameError: node: expected a node y_word"),
        ('bt.sweep(clean, corrupt, metric={"y_2": ("cat", "dog")})', "EvidenceError: y_2: expected one of its labels"),
        (
            'bt.sweep(clean, corrupt, metric={"y_2": "cat"}, at="v -> a", first_order=True)',
            "BNetError: at: expected nodes or rows of attention, for first_order=True",
        ),
        (
            "bt.sweep(clean, corrupt, metric=lambda y_2: y_2.argmax(-1), first_order=True)",
            "BNetError: metric: expected a metric with a gradient (torch operations on its nodes), for first_order=True",
        ),
        ('bt.sweep(clean, corrupt, metric={"y_2": "cat"}, at="zz")', "UnknownNameError: at: expected a known name"),
        (
            'bt.sweep(clean, corrupt, metric={"y_2": "cat"}, at=[])',
            'BNetError: at: expected a role ("x"), an arrow of roles ("v -> a"), or a list of names, patterns and paths of names',
        ),
        (
            'bt.sweep(clean, corrupt, metric={"y_2": "cat"}, at="v -> zz")',
            "UnknownNameError: at: expected a known name",
        ),
        ('bt.sweep(clean, corrupt, metric={"y_2": "cat"}, over="zz")', "UnknownNameError: over: expected a known name"),
        (
            'bt.sweep(clean, dec.sentence("the cat"), metric={"y_1": "cat"})',
            "BNetError: corrupt: expected sentences of 3 words, as clean",
        ),
        (
            'bt.sweep(clean, s, metric={"y_2": "cat"})',
            "BNetError: corrupt: expected sentences of the same net as clean",
        ),
        (
            'bt.sweep("the cat", "cat the", metric={"y_1": "cat"})',
            "BNetError: clean: expected a Sentence, or a list of them",
        ),
        ('bt.sweep([], [], metric={"y_1": "cat"})', "BNetError: clean: expected a Sentence, or a list of them"),
        (
            'bt.sweep([clean], [corrupt, clean], metric={"y_1": "cat"})',
            "BNetError: corrupt: expected as many sentences as clean, 1",
        ),
        (
            "bt.sweep(clean, corrupt, metric=None)",
            "BNetError: metric: expected a mapping {node: state or (state, other state)}, or a function whose parameters are names of nodes",
        ),
        ("bt.sweep(clean, corrupt, metric={})", "BNetError: metric: expected one node and its state"),
        (
            "bt.sweep(clean, corrupt, metric=lambda: 1.0)",
            "BNetError: metric: expected a mapping {node: state or (state, other state)}, or a function whose parameters are names of nodes",
        ),
        (
            "bt.sweep(clean, corrupt, metric=lambda y_2: nan)",
            "BNetError: metric: expected shape (1,), a number for each example",
        ),
        (
            "bt.sweep(clean, corrupt, metric=lambda y_2: y_2)",
            "BNetError: metric: expected shape (1,), a number for each example",
        ),
        (
            "bt.sweep(clean, corrupt, metric=lambda x_1_0: x_1_0)",
            "BNetError: metric: expected shape (1,), a number for each example",
        ),
        (
            "bt.sweep(clean, corrupt, metric=lambda x_1_0: 1 / 0)",
            "BNetError: metric: expected a function that returns a number for each example",
        ),
        (
            'bt.sweep(clean, corrupt, metric={"y_2": "cat"}, memory=-1)',
            "BNetError: memory: expected a whole number of at least 1",
        ),
        (
            'bt.sweep(clean, corrupt, metric={"y_2": "cat"}, progress="no")',
            "BNetError: progress: expected one of the allowed values",
        ),
        ('bt.sweep(None, corrupt, metric={"y_2": "cat"})', "BNetError: clean: expected a Sentence, or a list of them"),
        ('bt.sweep(clean, corrupt, metric={"x_1_0": 0})', "BNetError: x_1_0: expected a discrete random node"),
        ('bt.sweep(clean, corrupt, metric={"y_2": 1.0})', "EvidenceError: y_2: expected a state from 0 to 2"),
        (
            'bt.sweep(clean, corrupt, metric={"y_2": ()})',
            "BNetError: metric of y_2: expected a state, or a tuple of two",
        ),
        (
            'bt.sweep(inference.Zero, corrupt, metric={"y_2": "cat"})',
            "BNetError: clean: expected a Sentence, or a list of them",
        ),
    ],
    "mediation": [
        ('bt.mediation(clean, corrupt, metric={"y_2": "dog"})', "EvidenceError: y_2: expected one of its labels"),
        (
            'bt.mediation(clean, corrupt, metric={"y_2": "cat"}, through="zz")',
            "UnknownNameError: at: expected a known name",
        ),
        ('bt.mediation(inference.Zero(), corrupt, metric={"y_2": "cat"})', "BNetError: clean: expected sentences"),
        (
            'bt.mediation(clean, None, metric={"y_2": "cat"})',
            "BNetError: corrupt: expected a Sentence, or a list of them",
        ),
        (
            'bt.mediation(clean, corrupt, metric={"y_2": "cat"}, over=["zz"])',
            "UnknownNameError: over: expected a known name",
        ),
        (
            'bt.mediation(clean, corrupt, metric="y_2")',
            "BNetError: metric: expected a mapping {node: state or (state, other state)}, or a function whose parameters are names of nodes",
        ),
        (
            'bt.mediation(clean, corrupt, metric={"y_2": "cat"}, memory=0)',
            "BNetError: memory: expected a whole number of at least 1",
        ),
    ],
    "inference.sweeps.Sweep.index_of": [
        ('swept.index_of("zz")', "UnknownNameError: cell: expected a known name"),
        ("swept.index_of(None)", "UnknownNameError: cell: expected a known name"),
        ('swept.index_of("x_1")', "UnknownNameError: cell: expected a known name"),
        ('swept.index_of("x_0_9")', "UnknownNameError: cell: expected a known name"),
        ('swept.index_of("")', "UnknownNameError: cell: expected a known name"),
    ],
    "inference.sweeps.Sweep.interval": [
        ("swept.interval(1.0)", "BNetError: confidence: expected a share between 0 and 1"),
        ("swept.interval(nan)", "BNetError: confidence: expected a finite number"),
        ("swept.interval(0.9, draws=0)", "BNetError: draws: expected a whole number of at least 1"),
        ("swept.interval(0.9, seed=2**63)", "BNetError: seed: expected a whole number below 2^63"),
        ("swept.interval(0.9, seed=2**64)", "BNetError: seed: expected a whole number below 2^63"),
        ("swept.interval(0.9, seed=-1)", "BNetError: seed: expected a whole number of at least 0"),
        ("swept.interval(0.9)", "BNetError: interval: expected at least 2 examples, over which it is"),
    ],
    "inference.sweeps.Sweep.places_along": [
        ('swept.places_along("zz")', "UnknownNameError: axis: expected a known name"),
        ("swept.places_along(None)", "UnknownNameError: axis: expected a known name"),
        ("swept.places_along(0)", "UnknownNameError: axis: expected a known name"),
        ('swept.places_along("")', "UnknownNameError: axis: expected a known name"),
        ('swept.places_along("Word")', "UnknownNameError: axis: expected a known name"),
    ],
    "inference.sweeps.Sweep.to_dataframe": [
        ('swept.to_dataframe(examples="yes")', "BNetError: examples: expected one of the allowed values"),
        ("swept.to_dataframe(examples=1)", "BNetError: examples: expected one of the allowed values"),
        ("swept.to_dataframe(examples=None)", "BNetError: examples: expected one of the allowed values"),
        ("swept.to_dataframe(examples=torch.tensor(True))", "BNetError: examples: expected one of the allowed values"),
        ("swept.to_dataframe(examples=[])", "BNetError: examples: expected one of the allowed values"),
    ],
    "inference.sweeps.Sweep.top": [
        ("swept.top(0)", "BNetError: count: expected a whole number of at least 1"),
        ("swept.top(-1)", "BNetError: count: expected a whole number of at least 1"),
        ("swept.top(2.5)", "BNetError: count: expected a whole number of at least 1"),
        ("swept.top(True)", "BNetError: count: expected a whole number of at least 1"),
        ("swept.top(10**9)", "works: all cells that there are", "len(found) == 6"),
    ],
    "inference.sweeps.Sweep.where": [
        ("swept.where(zz=0)", "UnknownNameError: axis: expected a known name"),
        ("swept.where(word=9)", "BNetError: word: expected one of 0 to 2"),
        ('swept.where(word="the")', "BNetError: word: expected a whole number of at least 0"),
        ("swept.where(word=-1)", "BNetError: word: expected a whole number of at least 0"),
        ("swept.where()", "BNetError: where: expected an axis and its place"),
        ("swept.where(word=1.0)", "BNetError: word: expected a whole number of at least 0"),
    ],
    "inference.sweeps.Mediation.index_of": [
        ('mediated.index_of("zz")', "UnknownNameError: cell: expected a known name"),
        ("mediated.index_of(None)", "UnknownNameError: cell: expected a known name"),
        ('mediated.index_of("x_9_0")', "UnknownNameError: cell: expected a known name"),
        ('mediated.index_of("")', "UnknownNameError: cell: expected a known name"),
        ("mediated.index_of(0)", "UnknownNameError: cell: expected a known name"),
    ],
    "inference.sweeps.Mediation.of": [
        ('mediated.of("zz")', "BNetError: part: expected one of the allowed values"),
        ("mediated.of(None)", "BNetError: part: expected one of the allowed values"),
        ('mediated.of("total")', "BNetError: part: expected one of the allowed values"),
        ('mediated.of("")', "BNetError: part: expected one of the allowed values"),
        ("mediated.of(0)", "BNetError: part: expected one of the allowed values"),
    ],
    "inference.sweeps.Mediation.places_along": [
        ("mediated.places_along(3)", "UnknownNameError: axis: expected a known name"),
        ('mediated.places_along("zz")', "UnknownNameError: axis: expected a known name"),
        ("mediated.places_along(None)", "UnknownNameError: axis: expected a known name"),
        ('mediated.places_along("")', "UnknownNameError: axis: expected a known name"),
        ('mediated.places_along(("word",))', "UnknownNameError: axis: expected a known name"),
    ],
    "inference.sweeps.Mediation.to_dataframe": [
        ("mediated.to_dataframe(examples=1)", "BNetError: examples: expected one of the allowed values"),
        ('mediated.to_dataframe(examples="no")', "BNetError: examples: expected one of the allowed values"),
        ("mediated.to_dataframe(examples=None)", "BNetError: examples: expected one of the allowed values"),
        ("mediated.to_dataframe(examples=2.0)", "BNetError: examples: expected one of the allowed values"),
        ("mediated.to_dataframe(examples=())", "BNetError: examples: expected one of the allowed values"),
    ],
    "inference.sweeps.Mediation.top": [
        ("mediated.top(0)", "BNetError: count: expected a whole number of at least 1"),
        ("mediated.top(-3)", "BNetError: count: expected a whole number of at least 1"),
        ('mediated.top("all")', "BNetError: count: expected a whole number of at least 1"),
        ("mediated.top(None)", "BNetError: count: expected a whole number of at least 1"),
        ("mediated.top(1.5)", "BNetError: count: expected a whole number of at least 1"),
    ],
    "inference.sweeps.Mediation.where": [
        ("mediated.where(word=9)", "BNetError: word: expected one of 0 to 2"),
        ("mediated.where(zz=1)", "UnknownNameError: axis: expected a known name"),
        ("mediated.where(word=None)", "BNetError: word: expected a whole number of at least 0"),
        ("mediated.where(word=True)", "BNetError: word: expected a whole number of at least 0"),
        ("mediated.where(slice=0, word=-1)", "BNetError: word: expected a whole number of at least 0"),
    ],
}
