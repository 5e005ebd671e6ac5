"""Fitting."""

# ruff: noqa: E501

ROWS = {
    "fit": [
        ("bt.fit(None, pairs)", "BNetError: net: expected a net"),
        (
            "bt.fit(net, [])",
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            'bt.fit(net, "the cat")',
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        ('bt.fit(net, ["the cat sat"])', "BNetError: data[0], example: expected a pair (sentence, y)"),
        (
            'bt.fit(net, [("the cat sat", "cat the")], method=bt.MAP(steps=1))',
            "BNetError: data[0], y: expected values of shape (3,)",
        ),
        (
            'bt.fit(net, [("the cat sat", "cat the dog")], method=bt.MAP(steps=1))',
            "UnknownNameError: data[0], word of the sentence: expected a known name",
        ),
        ('bt.fit(net, pairs, method="mle")', "BNetError: method: expected one of the allowed values"),
        ("bt.fit(net, pairs, method=bt.MAP(steps=0))", "BNetError: steps: expected a whole number of at least 1"),
        ("bt.fit(net, pairs, method=bt.MAP(steps=1, rate=nan))", "BNetError: rate: expected a finite number above 0"),
        ("bt.fit(net, pairs, method=bt.MAP(steps=1, rate=-1.0))", "BNetError: rate: expected a finite number above 0"),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1), seed=2**63)",
            "BNetError: seed: expected a whole number below 2^63",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1), batch=0)",
            "BNetError: batch: expected a whole number of at least 1",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1, restarts=0))",
            "BNetError: restarts: expected a whole number of at least 1",
        ),
        (
            'bt.fit(net, pairs, method=bt.MAP(steps=1), learn=["zz"])',
            "BNetError: learn: expected learnable parameters above a readout",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1), learn=[])",
            "BNetError: net: expected parameters that a fit changes",
        ),
        (
            'bt.fit(net, pairs, method=bt.MAP(steps=1), device="cude")',
            "BNetError: device: expected a device of this machine that computes",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1), held_out=[])",
            "BNetError: held_out: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1), checkpoints=text)",
            "FileError: …/a.txt: expected a folder for checkpoints",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1), resume=True)",
            "BNetError: resume: expected an option of fit",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1), budget=1)",
            "BudgetError: exact elimination for y: expected at most 1 joint states for each sentence (c)",
        ),
        (
            "bt.fit(net, pairs, method=bt.EM(steps=1, inner=0))",
            "BNetError: inner: expected a whole number of at least 1",
        ),
        ("bt.fit(net, pairs, method=bt.NUTS(draws=0))", "BNetError: draws: expected a whole number of at least 1"),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1, anneal=2))",
            "BNetError: anneal: expected the power from which likelihoods rise to 1, a share",
        ),
        (
            'bt.fit(dec, ["the cat sat"], method=bt.MAP(steps=1))',
            "BNetError: data[0], example: expected a pair (sentence, y)",
        ),
        (
            'bt.fit(plain, ["the cat sat"], method=bt.MAP(steps=1))',
            "BNetError: net: expected a readout: a net without observe= has no likelihood to fit",
        ),
        (
            'bt.fit(net, pairs, method=bt.MAP(steps=1), progress="yes")',
            "BNetError: progress: expected one of the allowed values",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=10**18, rate=0.1, patience=0))",
            "BNetError: patience: expected a whole number of at least 1",
        ),
        ("bt.fit(net, pairs, method=bt.MAP(steps=1), spread=0)", "BNetError: spread: expected a finite number above 0"),
        (
            "bt.fit(net, (torch.tensor([[0, 1]]), torch.tensor([[0, 1, 2]])), method=bt.MAP(steps=1))",
            "BNetError: data[0], y: expected values of shape (2,)",
        ),
        (
            'bt.fit(net, (torch.tensor([[0, 1]], device="meta"), torch.tensor([[0, 1]])), method=bt.MAP(steps=1))',
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            "bt.fit(net, (np.ma.masked_equal([[0, 1]], 1), np.array([[0, 1]])), method=bt.MAP(steps=1))",
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            "bt.fit(net, (np.uint16([[0, 1]]), np.uint16([[0, 1]])), method=bt.MAP(steps=1))",
            "works: ids are ids, of whatever type",
            "found.sentences == 1",
        ),
        (
            'bt.fit(net, (np.array(["the cat"]), np.array(["cat the"])), method=bt.MAP(steps=1))',
            "works: arrays of text are lists of it",
            "found.sentences == 1",
        ),
        (
            'bt.fit(net, pairs, method=bt.MAP(steps=1), held_out=[("the cat", "dog cat")])',
            "UnknownNameError: held_out[0], word of the sentence: expected a known name",
        ),
        (
            "bt.fit(net, pairs, method=bt.MAP(steps=1), spread=1e30)",
            "BNetError: spread: expected a standard deviation whose square float32 can hold",
        ),
        (
            "bt.fit(real, (torch.ones(2, 3, 4), torch.full((2, 3, 4), 1e30)), method=bt.MAP(steps=1))",
            "BNetError: step 1: expected a finite bound, not far below its start",
        ),
        (
            "bt.fit(real, (torch.ones(2, 3, 4), torch.full((2, 3, 4), 1e30)), method=bt.NUTS(chains=1, draws=1, warmup=1), spread=1.0)",
            "BNetError: chain 0: expected a start with a finite density, among 100 draws of the prior",
        ),
        (
            "torch.inference_mode()(bt.fit)(net, pairs, method=bt.MAP(steps=1))",
            "works: a fit has gradients, whoever calls it",
            "found.finished",
        ),
    ],
    "Fit.heads_of": [
        ('fitted.heads_of("zz")', "UnknownNameError: selector: expected a known name"),
        ("fitted.heads_of(3)", "UnknownNameError: selector: expected a known name"),
        ('fitted.heads_of("q")', "UnknownNameError: selector: expected a known name"),
        ('fitted.heads_of("")', "UnknownNameError: selector: expected a known name"),
        ('fitted.heads_of(["c"])', "UnknownNameError: selector: expected a known name"),
        ("fitted.heads_of()", "works: the first selector", "found.selector == 'c'"),
    ],
    "Fit.compare": [
        ("fitted.compare(None)", "BNetError: compare: expected a Fit, or a net"),
        ('fitted.compare(net, selector="zz")', "BNetError: data: expected sentences to compare on"),
        ("fitted.compare(dec)", "BNetError: data: expected sentences to compare on"),
        ("fitted.compare(net, selector=3)", "BNetError: data: expected sentences to compare on"),
        (
            "fitted.compare(net, [])",
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        ('fitted.compare(net, ["the cat"])', "BNetError: data[0], example: expected a pair (sentence, y)"),
        (
            'fitted.compare(net, "the cat")',
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
    ],
    "Fit.interval": [
        ('fitted.interval("zz")', "BNetError: interval: expected a fit with a posterior"),
        ('fitted.interval("c.logits", 1.5)', "BNetError: interval: expected a fit with a posterior"),
        ('fitted.interval("c.logits")', "BNetError: interval: expected a fit with a posterior"),
        ("fitted.interval(None)", "BNetError: interval: expected a fit with a posterior"),
        ('fitted.interval("c.logits", nan)', "BNetError: interval: expected a fit with a posterior"),
        ('fitted.interval("c.logits", 0)', "BNetError: interval: expected a fit with a posterior"),
    ],
    "Fit.log_likelihood": [
        (
            "fitted.log_likelihood([])",
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            "fitted.log_likelihood(None)",
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            'fitted.log_likelihood("the cat")',
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        ('fitted.log_likelihood([("the cat", "the")])', "BNetError: data[0], y: expected values of shape (2,)"),
        (
            'fitted.log_likelihood([("the dog", "the cat")])',
            "UnknownNameError: data[0], word of the sentence: expected a known name",
        ),
        (
            "fitted.log_likelihood((torch.tensor([[0, 9]]), torch.tensor([[0, 1]])))",
            "BNetError: data[0], sentence: expected ids from 0 to 2",
        ),
    ],
    "Fit.predict": [
        ('fitted.predict("the dog")', "BNetError: data: expected a list of sentences, or an array of them"),
        ("fitted.predict([])", "BNetError: data: expected a list of sentences, or an array of them"),
        ('fitted.predict(["the cat"], readout="zz")', "UnknownNameError: readout: expected a known name"),
        ('fitted.predict(["the cat"], readout="x_1")', "UnknownNameError: readout: expected a known name"),
        ("fitted.predict(None)", "BNetError: data: expected a list of sentences, or an array of them"),
        ('fitted.predict(["the dgo"])', "UnknownNameError: data[0], word of the sentence: expected a known name"),
        ("fitted.predict(torch.tensor([[0, 7]]))", "BNetError: data[0], sentence: expected ids from 0 to 2"),
        ('fitted.predict(["the cat"], readout=["y"])', "UnknownNameError: readout: expected a known name"),
    ],
    "Fit.responsibilities": [
        ('fitted.responsibilities((["the cat sat"], ["the"]))', "BNetError: data[0], y: expected values of shape (3,)"),
        (
            "fitted.responsibilities(([], []))",
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            'fitted.responsibilities((["the cat sat"], ["cat the sat"]), selector="y")',
            "UnknownNameError: selector: expected a known name",
        ),
        (
            'fitted.responsibilities((["the cat sat"], []))',
            "BNetError: data: expected as many observations as sentences",
        ),
        (
            'fitted.responsibilities((["the cat sat"], ["cat the sat"]), selector=0)',
            "UnknownNameError: selector: expected a known name",
        ),
        (
            'fitted.responsibilities((["the cat sat"], None))',
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            'fitted.responsibilities((["the cat sat"], ["cat the dog"]))',
            "UnknownNameError: data[0], word of the sentence: expected a known name",
        ),
    ],
    "Fit.check": [
        ("fitted.check(pairs, draws=0)", "BNetError: draws: expected a whole number of at least 1"),
        ('fitted.check(pairs, statistics="mean")', "BNetError: statistics: expected a mapping from names"),
        (
            "fitted.check([], draws=1)",
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        (
            'fitted.check(pairs, statistics={"a": lambda *told: nan}, draws=2)',
            "works: NaN is no probability",
            "found.p['a'] != found.p['a']",
        ),
        (
            'fitted.check(pairs, statistics={"mean": "mean"}, draws=1)',
            "BNetError: statistic mean: expected a function of what is observed that returns a number",
        ),
        (
            "fitted.check(None)",
            "BNetError: data: expected pairs of sentences and what is observed of them: a list of pairs, or a tuple (x, y) of arrays or lists",
        ),
        ('fitted.check(pairs, readout="zz", draws=1)', "UnknownNameError: readout: expected a known name"),
        (
            'fitted.check(pairs, statistics={"a": lambda y: y}, draws=2)',
            "BNetError: statistic a: expected a function of what is observed that returns a number",
        ),
        (
            'fitted.check(pairs, {"a": 1})',
            "BNetError: statistic a: expected a function of what is observed that returns a number",
        ),
        (
            'fitted.check(pairs, {"a": lambda y: y.zero_().sum(), "b": lambda y: y.sum()}, draws=2)',
            "works: a statistic changes its own copy",
            'found.observed["b"] == 6',
        ),
        (
            "fitted.check(pairs, draws=1)",
            "works: the spread of one draw is not known",
            'math.isnan(found.spread["share of 0"])',
        ),
    ],
    "Fit.save": [
        ("fitted.save(folder)", "FileError: …: expected the path of a file"),
        ("fitted.save(None)", "FileError: path: expected the path of a file, a string or a Path"),
        ('fitted.save(folder / "no" / "a.fit")', "FileError: …/no/a.fit: expected a folder that is there"),
        ('fitted.save("")', "FileError: path: expected the path of a file, a string or a Path"),
        ("fitted.save(3)", "FileError: path: expected the path of a file, a string or a Path"),
    ],
    "data.Batch.take": [
        ("fitted.data.take(0)", "BNetError: which: expected a slice, or places from 0 to 1, a tensor of them"),
        ("fitted.data.take([0])", "BNetError: which: expected a slice, or places from 0 to 1, a tensor of them"),
        (
            "fitted.data.take(torch.tensor(0))",
            "BNetError: which: expected a slice, or places from 0 to 1, a tensor of them",
        ),
        (
            "fitted.data.take(torch.tensor([2]))",
            "BNetError: which: expected a slice, or places from 0 to 1, a tensor of them",
        ),
        (
            "fitted.data.take(torch.tensor([0.5]))",
            "BNetError: which: expected a slice, or places from 0 to 1, a tensor of them",
        ),
        ("fitted.data.take(slice(5, 9))", "works: there is none", "len(found) == 0"),
    ],
}
