"""TPMs."""

# ruff: noqa: E501

ROWS = {
    "tpm.TPM": [
        ('bt.Node("x", bt.tpm.TPM)', "BNetError: node x: expected a TPM"),
        ('bt.Node("x", "Linear")', "BNetError: node x: expected a TPM"),
        (
            'of(mine(shape=lambda self, x: None), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for Mine, a shape, a tuple of whole numbers",
        ),
        (
            'of(mine(shape=lambda self, x: [4]), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for Mine, a shape, a tuple of whole numbers",
        ),
        (
            'of(mine(shape=lambda self, x: (0,)), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for Mine, a shape, a tuple of whole numbers",
        ),
        (
            'of(mine(shape=lambda self, x: 1 / 0), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for Mine, a TPM that takes x_1 of shape (4,)",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": (4,)}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for Mine, parameters, a mapping from names to Parameter",
        ),
        (
            'of(mine(kind="random"), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for Mine, a kind: input, deterministic, discrete or continuous",
        ),
        (
            'of(mine(value=lambda self, at, x: x.sum(-1)), "x").sentence([0, 1])["z_1"]',
            "BNetError: z (Mine): expected a value of shape (4,), as it says",
        ),
        (
            'of(mine(value=lambda self, at, x: None), "x").sentence([0, 1])["z_1"]',
            "BNetError: z (Mine): expected a value of shape (4,), as it says",
        ),
        (
            'of(mine(slots=("x", "x")), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 2 parents (Mine takes x, x)",
        ),
        (
            'of(mine(kind="discrete"), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected a number of states, or words to read",
        ),
    ],
    "tpm.Given": [
        ("bt.tpm.Given(0)", "BNetError: Given: expected a whole number of at least 1"),
        ("bt.tpm.Given((4, -1))", "BNetError: Given: expected a whole number of at least 1"),
        ("bt.tpm.Given(2.0)", "BNetError: Given: expected a whole number of at least 1"),
        ("bt.tpm.Given(4, states=3)", "BNetError: Given: expected a size or states=, not both"),
        ("bt.tpm.Given(states=3, default=3)", "BNetError: default: expected one of the states"),
        ("bt.tpm.Given(states=0)", "BNetError: states: expected a whole number of at least 1"),
        ('bt.tpm.Given("4")', "BNetError: Given: expected a whole number of at least 1"),
        ("bt.tpm.Given(states=True)", "BNetError: states: expected a whole number of at least 1"),
        ("bt.tpm.Given(image=True)", "BNetError: image: expected Patches, or None"),
    ],
    "tpm.Weight": [
        ("bt.tpm.Weight(0)", "BNetError: Weight: expected a whole number of at least 1"),
        ("bt.tpm.Weight((2, 0))", "BNetError: Weight: expected a whole number of at least 1"),
        ("bt.tpm.Weight(None)", "BNetError: Weight: expected a whole number of at least 1"),
        ("bt.tpm.Weight(2, spread=0)", "BNetError: spread: expected a finite number above 0"),
        ("bt.tpm.Weight(2, spread=nan)", "BNetError: spread: expected a finite number above 0"),
        ('bt.tpm.Weight("22")', "BNetError: Weight: expected a whole number of at least 1"),
    ],
    "tpm.Affine": [
        ("bt.tpm.Affine(0)", "BNetError: dim: expected a whole number of at least 1"),
        ("bt.tpm.Affine(2.5)", "BNetError: dim: expected a whole number of at least 1"),
        ('bt.tpm.Affine("2")', "BNetError: dim: expected a whole number of at least 1"),
        ("bt.tpm.Affine(True)", "BNetError: dim: expected a whole number of at least 1"),
        ("bt.tpm.Affine(-1)", "BNetError: dim: expected a whole number of at least 1"),
    ],
    "tpm.Start": [
        ("bt.tpm.Start(0)", "BNetError: spread: expected a finite number above 0"),
        ("bt.tpm.Start(nan)", "BNetError: spread: expected a finite number above 0"),
        ("bt.tpm.Start(-1.0)", "BNetError: spread: expected a finite number above 0"),
        ("bt.tpm.Start(None)", "BNetError: spread: expected a finite number above 0"),
        ('bt.tpm.Start("0.1")', "BNetError: spread: expected a finite number above 0"),
    ],
    "tpm.Positions": [
        ("bt.tpm.Positions(0, 4)", "BNetError: length: expected a whole number of at least 1"),
        ("bt.tpm.Positions(4, 0)", "BNetError: dim: expected a whole number of at least 1"),
        ("bt.tpm.Positions(4.0, 4)", "BNetError: length: expected a whole number of at least 1"),
        ("bt.tpm.Positions(4, 4, spread=0)", "BNetError: spread: expected a finite number above 0"),
        ("bt.tpm.Positions(None, 4)", "BNetError: length: expected a whole number of at least 1"),
    ],
    "tpm.Sinusoid": [
        ("bt.tpm.Sinusoid(0)", "BNetError: dim: expected a whole number of at least 1"),
        ("bt.tpm.Sinusoid(4, base=0)", "BNetError: base: expected a finite number above 0"),
        ("bt.tpm.Sinusoid(4, base=nan)", "BNetError: base: expected a finite number above 0"),
        ("bt.tpm.Sinusoid(4, first=2)", "BNetError: first: expected one of the allowed values"),
        ("bt.tpm.Sinusoid(4, halves=1)", "BNetError: halves: expected one of the allowed values"),
    ],
    "tpm.Linear": [
        ("bt.tpm.Linear(0)", "BNetError: dim: expected a whole number of at least 1"),
        ("bt.tpm.Linear(-2)", "BNetError: dim: expected a whole number of at least 1"),
        ("bt.tpm.Linear(2.0)", "BNetError: dim: expected a whole number of at least 1"),
        ('bt.tpm.Linear("2")', "BNetError: dim: expected a whole number of at least 1"),
        (
            "of(bt.tpm.Linear())",
            "DeclarationError: the declaration has 1 fault: z: expected 2 parents (Linear takes W, x)",
        ),
        (
            'of(bt.tpm.Linear(4), "x", "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 1 parents (Linear takes x)",
        ),
        (
            'of(bt.tpm.Linear(4), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
        ('of(bt.tpm.Linear(10**12), "x")', "BudgetError: parameters: expected at most 8589934592 numbers"),
    ],
    "tpm.FeedForward": [
        ("bt.tpm.FeedForward(0)", "BNetError: hidden: expected a whole number of at least 1"),
        ('bt.tpm.FeedForward(4, "rleu")', "BNetError: activation: expected one of the allowed values"),
        ('bt.tpm.FeedForward(4, gated="yes")', "BNetError: gated: expected one of the allowed values"),
        ("bt.tpm.FeedForward(2.5)", "BNetError: hidden: expected a whole number of at least 1"),
        (
            'of(bt.tpm.FeedForward(4), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
    ],
    "tpm.Gated": [
        ('bt.tpm.Gated("sigmiod")', "BNetError: activation: expected one of the allowed values"),
        ("bt.tpm.Gated(None)", "BNetError: activation: expected one of the allowed values"),
        (
            'of(bt.tpm.Gated(), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 2 parents (Gated takes g, x)",
        ),
        (
            'of(bt.tpm.Gated(), "x", "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector of width 4, as x_1",
        ),
        (
            'of(bt.tpm.Gated(), "x", "wide")',
            "DeclarationError: the declaration has 1 fault: z: expected for wide, a vector of width 4, as x_1",
        ),
    ],
    "tpm.Activation": [
        ('bt.tpm.Activation("rule")', "BNetError: activation: expected one of the allowed values"),
        ("bt.tpm.Activation(None)", "BNetError: activation: expected one of the allowed values"),
        ("bt.tpm.Activation(torch.relu)", "BNetError: activation: expected one of the allowed values"),
        (
            'of(bt.tpm.Activation(), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
        (
            'of(bt.tpm.Activation(), "x", "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 1 parents (Activation takes x)",
        ),
    ],
    "tpm.Norm": [
        ('bt.tpm.Norm("batch")', "BNetError: norm: expected one of the allowed values"),
        ("bt.tpm.Norm(eps=0)", "BNetError: eps: expected a finite number above 0"),
        ("bt.tpm.Norm(eps=-1.0)", "BNetError: eps: expected a finite number above 0"),
        ("bt.tpm.Norm(eps=nan)", "BNetError: eps: expected a finite number above 0"),
        ("bt.tpm.Norm(affine=1)", "BNetError: affine: expected one of the allowed values"),
        (
            'of(bt.tpm.Norm(), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
    ],
    "tpm.Add": [
        ("of(bt.tpm.Add())", "DeclarationError: the declaration has 1 fault: z: expected for Add, at least one parent"),
        (
            'of(bt.tpm.Add(), "x", "wide")',
            "DeclarationError: the declaration has 1 fault: z: expected for wide, a value of shape (4,), as x_1",
        ),
        (
            'of(bt.tpm.Add(), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a value of shape (), as token",
        ),
        (
            'of(bt.tpm.Add(), "x", "x")',
            "works: twice the same",
            "found.sentence([0, 1])['z_1'].equal(2 * found.sentence([0, 1])['x_1_1'])",
        ),
        (
            'of(bt.tpm.Add(), "x", "zz")',
            "DeclarationError: the declaration has 1 fault: z: expected an arrow from a declared role (near matches are z)",
        ),
    ],
    "tpm.Concat": [
        ("bt.tpm.Concat(plates=0)", "BNetError: plates: expected a whole number of at least 1"),
        ('bt.tpm.Concat(mapped="yes")', "BNetError: mapped: expected one of the allowed values"),
        ("bt.tpm.Concat(bias=None)", "BNetError: bias: expected one of the allowed values"),
        (
            'of(bt.tpm.Concat(), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 2 parents (Concat takes W_o., a.)",
        ),
        (
            'of(bt.tpm.Concat(), every("x"), "x")',
            "DeclarationError: the declaration has 2 faults: z: expected for the slot a. of Concat, a collection (an arrow from every word or every head)",
        ),
    ],
    "tpm.Dropout": [
        ("bt.tpm.Dropout(1)", "BNetError: dropout p: expected a probability below 1"),
        ("bt.tpm.Dropout(-0.1)", "BNetError: dropout p: expected a probability below 1"),
        ("bt.tpm.Dropout(nan)", "BNetError: dropout p: expected a finite number"),
        ('bt.tpm.Dropout("0.1")', "BNetError: dropout p: expected a finite number"),
        (
            'of(bt.tpm.Dropout(), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
    ],
    "tpm.Embed": [
        ("bt.tpm.Embed(0)", "BNetError: dim: expected a whole number of at least 1"),
        ("bt.tpm.Embed(4, scale=nan)", "BNetError: scale: expected a finite number"),
        ("bt.tpm.Embed(4, spread=0)", "BNetError: spread: expected a finite number above 0"),
        (
            'of(bt.tpm.Embed(4), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for x_1, a discrete node (its states index a table)",
        ),
        (
            'of(bt.tpm.Embed(4, tied=True), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected 2 parents (Embed takes W, token)",
        ),
        ('bt.tpm.Embed(4, tied="W")', "BNetError: tied: expected one of the allowed values"),
    ],
    "tpm.Pool": [
        ('bt.tpm.Pool("max")', "BNetError: pool: expected one of the allowed values"),
        ("bt.tpm.Pool(None)", "BNetError: pool: expected one of the allowed values"),
        (
            'of(bt.tpm.Pool(), "x")',
            "DeclarationError: the declaration has 2 faults: z: expected for the slot x. of Pool, a collection (an arrow from every word or every head)",
        ),
        (
            'of(bt.tpm.Pool(), every("token"))',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
        (
            'of(bt.tpm.Pool(), every("x"), every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected 1 parents (Pool takes x.)",
        ),
    ],
    "tpm.Patches": [
        ("bt.tpm.Patches(0, 4, 4, 2, 2)", "BNetError: channels of the patches: expected a whole number of at least 1"),
        ("bt.tpm.Patches(1, 4, 4, 8, 2)", "BNetError: patches: expected at most the image, 4 x 4"),
        (
            "bt.tpm.Patches(1, 4, 4, 3, 3)",
            "works: rows and columns that fill no patch are left",
            "found.tokens == ('[CLS]', '0,0')",
        ),
        ("bt.tpm.Patches(1, 4.0, 4, 2, 2)", "BNetError: rows of the patches: expected a whole number of at least 1"),
        ("bt.tpm.Patches(1, 4, 4, 0, 2)", "BNetError: high of the patches: expected a whole number of at least 1"),
        ("bt.tpm.Given(3, image=bt.tpm.Patches(1, 4, 4, 2, 2))", "BNetError: Given: expected the size 4 of a patch"),
    ],
    "tpm.Select": [
        ("bt.tpm.Select(0)", "BNetError: Select: expected a whole number of at least 1"),
        ("bt.tpm.Select((4, 0))", "BNetError: Select: expected a whole number of at least 1"),
        ("bt.tpm.Select(4, spread=-1)", "BNetError: spread: expected a finite number above 0"),
        (
            "of(bt.tpm.Select(4))",
            "DeclarationError: the declaration has 1 fault: z: expected for Select, a discrete parent that selects",
        ),
        (
            'of(bt.tpm.Select(4), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for x_1, a discrete node (its states index a table)",
        ),
        ("bt.tpm.Select(None)", "BNetError: Select: expected a whole number of at least 1"),
    ],
    "tpm.Codebook": [
        ("bt.tpm.Codebook(0, 4)", "BNetError: atoms: expected a whole number of at least 1"),
        ("bt.tpm.Codebook(2, 0)", "BNetError: Codebook: expected a whole number of at least 1"),
        ("bt.tpm.Codebook(2, 4, prior=0)", "BNetError: prior: expected a finite number above 0"),
        ("bt.tpm.Codebook(2, 4, spread=nan)", "BNetError: spread: expected a finite number above 0"),
        (
            'of(bt.tpm.Codebook(2, 4), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for x_1, a discrete node (its states index a table)",
        ),
        ("bt.tpm.Codebook(2.0, 4)", "BNetError: atoms: expected a whole number of at least 1"),
    ],
    "tpm.Categorical": [
        ("bt.tpm.Categorical(0)", "BNetError: Categorical states: expected a whole number of at least 1"),
        ("bt.tpm.Categorical(2.0)", "BNetError: Categorical states: expected a whole number of at least 1"),
        (
            "bt.tpm.Categorical(2, probabilities=(0.5, 0.6))",
            "BNetError: probabilities: expected 2 numbers from 0 to 1 that sum to 1",
        ),
        (
            "bt.tpm.Categorical(2, probabilities=(nan, 1.0))",
            "BNetError: probabilities: expected 2 numbers from 0 to 1 that sum to 1",
        ),
        (
            "bt.tpm.Categorical(2, probabilities=(-0.5, 1.5))",
            "BNetError: probabilities: expected 2 numbers from 0 to 1 that sum to 1",
        ),
        (
            "bt.tpm.Categorical(3, probabilities=(0.5, 0.5))",
            "BNetError: probabilities: expected 3 numbers from 0 to 1 that sum to 1",
        ),
        ('bt.tpm.Categorical(2, labels=("a", "a"))', "BNetError: labels: expected 2 different labels, one a state"),
        ("bt.tpm.Categorical(2, prior=0)", "BNetError: prior: expected a finite number above 0"),
        ('bt.tpm.Categorical(2, pool="max")', "BNetError: pool: expected one of the allowed values"),
        (
            'of(bt.tpm.Categorical(2), every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected for the slot x of Categorical, a single parent",
        ),
        (
            "bt.tpm.Categorical(2, probabilities=range(10**12))",
            "BNetError: probabilities: expected 2 numbers from 0 to 1 that sum to 1",
        ),
        ("bt.tpm.Categorical(2, learnable=1)", "BNetError: learnable: expected one of the allowed values"),
        ("bt.tpm.Categorical(1).n", "works: one state, which is certain", "found == 1"),
    ],
    "tpm.Normal": [
        ("bt.tpm.Normal(0)", "BNetError: sigma: expected a finite number above 0"),
        ("bt.tpm.Normal(-1.0)", "BNetError: sigma: expected a finite number above 0"),
        ("bt.tpm.Normal(nan)", "BNetError: sigma: expected a finite number above 0"),
        ("bt.tpm.Normal(inf)", "BNetError: sigma: expected a finite number above 0"),
        ("bt.tpm.Normal(dim=0)", "BNetError: dim: expected a whole number of at least 1"),
        ('bt.tpm.Normal(pool="max")', "BNetError: pool: expected one of the allowed values"),
        (
            'of(bt.tpm.Normal(), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
    ],
    "tpm.Attention": [
        ('bt.tpm.Attention(score="dot")', "BNetError: score: expected a score"),
        ('bt.tpm.Attention(normaliser="softmax")', "BNetError: normaliser: expected a Normaliser"),
        ('bt.tpm.Attention(over="values")', "BNetError: over: expected one of the allowed values"),
        ("bt.tpm.Attention(bias=1)", "BNetError: bias: expected a bias by distance"),
        ("bt.tpm.Attention(residual=None)", "BNetError: residual: expected one of the allowed values"),
        (
            'of(bt.tpm.Attention(), "x", "x", "x")',
            "DeclarationError: the declaration has 3 faults: z: expected for the slot k. of Attention, a collection (an arrow from every word or every head)",
        ),
        (
            'of(bt.tpm.Attention(), "x", every("wide"), every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected for wide, a vector of width 4 (as x_1)",
        ),
        (
            'of(bt.tpm.Attention(), "token", every("x"), every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
        (
            'of(bt.tpm.Attention(), every("x"), every("x"), every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected for the slot q of Attention, a single parent",
        ),
    ],
    "tpm.Read": [
        ("bt.tpm.Read(score=1)", "BNetError: score: expected a score"),
        ('bt.tpm.Read(over="rows")', "BNetError: over: expected one of the allowed values"),
        ("bt.tpm.Read(bias=0.5)", "BNetError: bias: expected a bias by distance"),
        (
            'of(bt.tpm.Read(), "x", "x")',
            "DeclarationError: the declaration has 2 faults: z: expected for the slot k. of Read, a collection (an arrow from every word or every head)",
        ),
        (
            'of(bt.tpm.Read(), "x", every("wide"))',
            "DeclarationError: the declaration has 1 fault: z: expected for wide, a vector of width 4 (as x_1)",
        ),
    ],
    "tpm.Cayley": [
        ('bt.tpm.Cayley("skw")', "BNetError: form: expected one of the allowed values"),
        ("bt.tpm.Cayley(None)", "BNetError: form: expected one of the allowed values"),
        (
            'of(bt.tpm.Cayley(), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 2 parents (Cayley takes z., A)",
        ),
        (
            'of(bt.tpm.Cayley(), "token", "x")',
            "DeclarationError: the declaration has 2 faults: z: expected for the slot z. of Cayley, a collection (an arrow from every word or every head)",
        ),
        (
            'of(bt.tpm.Cayley("arbitrary"), every("x"), every("x"))',
            "DeclarationError: the declaration has 2 faults: z: expected for the slot A of Cayley, a single parent",
        ),
    ],
    "tpm.Dot": [
        ('bt.tpm.Dot("1")', "BNetError: scale: expected a finite number"),
        ("bt.tpm.Dot(nan)", "BNetError: scale: expected a finite number"),
        (
            "bt.bayesuvius(4, scale=1e308)",
            "DeclarationError: the declaration has 1 fault: x_1: expected scale of at most 3.4028e+38 in size, as torch.float32 holds",
        ),
        ("bt.tpm.Dot(inf)", "BNetError: scale: expected a finite number"),
        ('bt.tpm.Dot(1.0, rotary="yes")', "BNetError: rotary base: expected a finite number above 0"),
        ("bt.tpm.Dot(1.0, rotary=0)", "BNetError: rotary base: expected a finite number above 0"),
        ("bt.tpm.Dot(True)", "BNetError: scale: expected a finite number"),
        (
            'of(bt.tpm.Attention(bt.tpm.Dot(1.0, rotary=10.0)), "odd", every("odd"), every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected for odd, an even width (rotary positions pair it)",
        ),
    ],
    "tpm.Bilinear": [
        ("bt.tpm.Bilinear(nan)", "BNetError: scale: expected a finite number"),
        ('bt.tpm.Bilinear("1")', "BNetError: scale: expected a finite number"),
        ("bt.tpm.Bilinear(None)", "BNetError: scale: expected a finite number"),
        (
            'of(bt.tpm.Attention(bt.tpm.Bilinear()), "x", every("x"), every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected 4 parents (Attention takes z, z., v., A)",
        ),
        (
            'of(bt.tpm.Attention(bt.tpm.Bilinear()), "x", every("x"), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 4 parents (Attention takes z, z., v., A)",
        ),
    ],
    "tpm.Scale": [
        ("bt.tpm.Scale(nan)", "BNetError: factor: expected a finite number"),
        ('bt.tpm.Scale("2")', "BNetError: factor: expected a finite number"),
        (
            'of(bt.tpm.Scale(1e5), "x").to(torch.float16)',
            "DeclarationError: the declaration has 1 fault: z: expected factor of at most 65504 in size, as torch.float16 holds",
        ),
        ("bt.tpm.Scale(None)", "BNetError: factor: expected a finite number"),
        ("bt.tpm.Scale(True)", "BNetError: factor: expected a finite number"),
        (
            'of(bt.tpm.Scale(2.0), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
    ],
    "tpm.Relative": [
        ("bt.tpm.Relative(0)", "works: one number for every distance", "found.limit == 0"),
        ("bt.tpm.Relative(-1)", "BNetError: limit: expected a whole number of at least 0"),
        ("bt.tpm.Relative(2.0)", "BNetError: limit: expected a whole number of at least 0"),
        ("bt.tpm.Relative(None)", "BNetError: limit: expected a whole number of at least 0"),
        (
            'of(bt.tpm.Attention(bias=bt.tpm.Relative(2)), "x", every("x"), every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected 4 parents (Attention takes q, k., v., b)",
        ),
    ],
    "tpm.Buckets": [
        ("bt.tpm.Buckets(0)", "BNetError: count of buckets: expected a whole number of at least 4"),
        (
            "bt.tpm.Buckets(32, 1)",
            "BNetError: furthest: expected more than 8, the distances with a bucket of their own",
        ),
        ("bt.tpm.Buckets(2.5)", "BNetError: count of buckets: expected a whole number of at least 4"),
        ("bt.tpm.Buckets(3)", "BNetError: count of buckets: expected a whole number of at least 4"),
        ('bt.tpm.Buckets(32, 128, "yes")', "BNetError: two_sided: expected one of the allowed values"),
        ("bt.tpm.Buckets(1)", "BNetError: count of buckets: expected a whole number of at least 4"),
    ],
    "tpm.Rotary": [
        ("bt.tpm.Rotary(0)", "BNetError: rotary base: expected a finite number above 0"),
        ("bt.tpm.Rotary(nan)", "BNetError: rotary base: expected a finite number above 0"),
        ("bt.tpm.Rotary(width=3)", "BNetError: rotary width: expected an even number (features are paired)"),
        ("bt.tpm.Rotary(factor=0)", "BNetError: rotary factor: expected a finite number above 0"),
        ("bt.tpm.Rotary(bands=(4.0, 1.0, 8))", "BNetError: high of the rotary bands: expected a finite number above 4"),
        ('bt.tpm.Rotary(bands="abc")', "BNetError: rotary bands: expected (low, high, length)"),
        ("bt.tpm.Rotary(width=0)", "BNetError: rotary width: expected a whole number of at least 2"),
    ],
    "tpm.Normaliser": [
        ('bt.tpm.Normaliser("sofmax")', "BNetError: normaliser: expected one of the allowed values"),
        ("bt.tpm.Normaliser(None)", "BNetError: normaliser: expected one of the allowed values"),
        ('bt.tpm.Normaliser("")', "BNetError: normaliser: expected one of the allowed values"),
        ("bt.tpm.Normaliser(0)", "BNetError: normaliser: expected one of the allowed values"),
        ("bt.tpm.Normaliser(torch.softmax)", "BNetError: normaliser: expected one of the allowed values"),
    ],
    "tpm.Recur": [
        ("bt.tpm.Recur(0)", "BNetError: dim: expected a whole number of at least 1"),
        ('bt.tpm.Recur(4, "tahn")', "BNetError: activation: expected one of the allowed values"),
        ('bt.tpm.Recur(4, bias="yes")', "BNetError: bias: expected one of the allowed values"),
        ("bt.tpm.Recur(2.0)", "BNetError: dim: expected a whole number of at least 1"),
        (
            'of(bt.tpm.Recur(4), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 2 parents (Recur takes x, h)",
        ),
        (
            'of(bt.tpm.Recur(4), "x", "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
    ],
    "tpm.Memory": [
        (
            'of(bt.tpm.Memory(), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected 4 parents (Memory takes input, candidate, forget, cell)",
        ),
        (
            'of(bt.tpm.Memory(), "x", "x", "x", "wide")',
            "DeclarationError: the declaration has 1 fault: z: expected for wide, a vector of width 4, as x_1",
        ),
        (
            'of(bt.tpm.Memory(), "x", "x", "x", "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector of width 4, as x_1",
        ),
        (
            'of(bt.tpm.Memory(), "x", "x", "x", every("x"))',
            "DeclarationError: the declaration has 1 fault: z: expected for the slot cell of Memory, a single parent",
        ),
        (
            'of(bt.tpm.Memory(), "x", "x", "x", "zz")',
            "DeclarationError: the declaration has 1 fault: z: expected an arrow from a declared role (near matches are z)",
        ),
    ],
    "tpm.ResNet": [
        ("bt.tpm.ResNet(0)", "BNetError: blocks: expected a whole number of at least 1"),
        ('bt.tpm.ResNet(1, "tan")', "BNetError: activation: expected one of the allowed values"),
        ("bt.tpm.ResNet(1.0)", "BNetError: blocks: expected a whole number of at least 1"),
        ("bt.tpm.ResNet(-1)", "BNetError: blocks: expected a whole number of at least 1"),
        (
            'of(bt.tpm.ResNet(), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
    ],
    "tpm.Skew": [
        ("bt.tpm.Skew(0)", "BNetError: dim: expected a whole number of at least 2"),
        ("bt.tpm.Skew(1)", "BNetError: dim: expected a whole number of at least 2"),
        ("bt.tpm.Skew(3, spread=0)", "BNetError: spread: expected a finite number above 0"),
        ("bt.tpm.Skew(3.0)", "BNetError: dim: expected a whole number of at least 2"),
        ("bt.tpm.Skew(3, spread=inf)", "BNetError: spread: expected a finite number above 0"),
    ],
    "tpm.Triangular": [
        ('bt.tpm.Triangular("left")', "BNetError: side: expected one of the allowed values"),
        ('bt.tpm.Triangular("lower", "tan")', "BNetError: activation: expected one of the allowed values"),
        ("bt.tpm.Triangular(bias=None)", "BNetError: bias: expected one of the allowed values"),
        ("bt.tpm.Triangular(spread=nan)", "BNetError: spread: expected a finite number above 0"),
        (
            'of(bt.tpm.Triangular(), "token")',
            "DeclarationError: the declaration has 1 fault: z: expected for token, a vector",
        ),
    ],
    "tpm.Parameter": [
        ("bt.tpm.Parameter((2,), -1.0)", "BNetError: spread of a parameter: expected a finite number of at least 0"),
        ('bt.tpm.Parameter("ab")', "BNetError: shape of a parameter: expected a whole number of at least 1"),
        (
            "bt.tpm.Parameter((2,), fill=nan)",
            "BNetError: fill of a parameter: expected finite numbers, one or of shape (2,)",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter(("a",))}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for shape of a parameter, a whole number of at least 1",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter((-1,))}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for shape of a parameter, a whole number of at least 1",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter((2,), -1.0)}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for spread of a parameter, a finite number of at least 0",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter((2,), nan)}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for spread of a parameter, a finite number",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter((2,), fill=nan)}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for fill of a parameter, finite numbers, one or of shape (2,)",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter((2,), fill=(1.0, 2.0, 3.0))}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for fill of a parameter, finite numbers, one or of shape (2,)",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter((2,), fill="one")}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for fill of a parameter, finite numbers, one or of shape (2,)",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter(2)}), "x")',
            "works: as (2,)",
            "found.parameters['z.p'].shape == (2,)",
        ),
        (
            'of(mine(parameters=lambda self, x: {3: bt.tpm.Parameter((2,))}), "x")',
            "DeclarationError: the declaration has 1 fault: z: expected for Mine, parameters, a mapping from names to Parameter",
        ),
        (
            'of(mine(parameters=lambda self, x: {"p": bt.tpm.Parameter((10**12,))}), "x")',
            "BudgetError: parameters: expected at most 8589934592 numbers",
        ),
        (
            "bt.tpm.Parameter((2,), fill=np.array([1j, 0]))",
            "BNetError: fill of a parameter: expected finite numbers, one or of shape (2,)",
        ),
    ],
}
