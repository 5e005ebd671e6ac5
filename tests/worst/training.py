"""Training, decoding, small tasks."""

# ruff: noqa: E501

ROWS = {
    "training.generate": [
        (
            'training.generate(dec.network, ["the"], method="beam", beams=10**15, length=2)',
            "BudgetError: generate: expected at most",
        ),
        (
            'training.generate(dec.network, ["the"], method="beam", penalty=nan)',
            "BNetError: penalty: expected a finite number",
        ),
        (
            'training.generate(dec.network, ["the"], method="sample", top_k=10**9, length=1)',
            "works: among all words",
            "found.words[0][0] in ('the', 'cat', 'sat')",
        ),
        (
            'training.generate(dec.network, ["the"], start="sat", length=1)',
            "works: behind the start",
            "len(found.words[0]) == 1",
        ),
        (
            'training.generate(dec.network, ["the"], cached="yes", length=1)',
            "BNetError: cached: expected one of the allowed values",
        ),
        ("training.generate(None)", "BNetError: net: expected a net"),
        (
            "training.generate(dec.network, torch.tensor([[0.5]]), length=1)",
            "BNetError: sentence: expected text, a list of words, or ids",
        ),
        (
            'training.generate(dec.network, [["the", 1]], length=1)',
            "BNetError: sentence: expected text, a list of words, or ids",
        ),
        (
            'training.generate(dec.network, ["the"], method="sample", temperature=inf, length=1)',
            "BNetError: temperature: expected a finite number above 0",
        ),
    ],
    "training.iterate": [
        ("training.iterate(vp, torch.zeros(4, 3), 2)", "works: a net, as its network", "found.shape == (2, 3)"),
        ("training.iterate(None, torch.zeros(4, 3), 2)", "BNetError: net: expected a net"),
        (
            'training.iterate(vp.network, torch.zeros(4, 3), 2, grow="yes")',
            "BNetError: grow: expected one of the allowed values",
        ),
        (
            "training.iterate(vp.network, torch.zeros(4, 3), 2, ahead=0)",
            "BNetError: ahead: expected a whole number of at least 1",
        ),
        (
            "training.iterate(vp.network, torch.zeros(4, 3), 2, module=module)",
            "BNetError: module: expected net.module().eval() of this very net, or None",
        ),
        (
            'training.iterate(vp.network, torch.zeros(4, 3), 2, compile="yes")',
            "BNetError: compile: expected one of the allowed values",
        ),
        (
            "training.iterate(vp.network, torch.zeros(4, 3), 2, sample=1)",
            "BNetError: sample: expected one of the allowed values",
        ),
        ('training.iterate(vp.network, "the cat", 2)', "BNetError: window: expected real numbers"),
    ],
    "training.windows": [
        (
            "training.windows(torch.zeros(5, 3), 4, 2)",
            "BNetError: series: expected [..., word, dim], at least 6 words: 4 and 2 further on",
        ),
        ("training.windows(torch.zeros(5, 3), 0, 1)", "BNetError: words: expected a whole number of at least 1"),
        ("training.windows(torch.zeros(5, 3), 2, -1)", "BNetError: ahead: expected a whole number of at least 1"),
        (
            "training.windows(torch.zeros(5), 2, 1)",
            "BNetError: series: expected [..., word, dim], at least 3 words: 2 and 1 further on",
        ),
        ('training.windows("series", 2, 1)', "BNetError: series: expected real numbers"),
        (
            "training.windows(torch.full((5, 3), nan), 2, 1)",
            "works: as they stand; train refuses them",
            "bool(found[0].isnan().all())",
        ),
        (
            "training.windows(torch.zeros(0, 3), 1, 1)",
            "BNetError: series: expected [..., word, dim], at least 2 words: 1 and 1 further on",
        ),
        ("training.windows(None, 1, 1)", "BNetError: series: expected real numbers"),
        ("training.windows(torch.zeros(5, 3), 2.0, 1)", "BNetError: words: expected a whole number of at least 1"),
    ],
    "train": [
        ('bt.train(None, ["the cat"])', "BNetError: net: expected a net"),
        (
            "bt.train(dec, [])",
            "BNetError: data: expected a list of sentences or of pairs, an array [sentence, word], a pair of arrays, a file of tokens",
        ),
        ('bt.train(dec, "the cat", steps=1)', "FileError: the cat: expected a file of tokens: .npy, or .bin of uint16"),
        (
            'bt.train(dec, ["the dgo"], steps=1)',
            "UnknownNameError: data[0], word of the sentence: expected a known name",
        ),
        (
            'bt.train(dec, ["the"], steps=1)',
            "BNetError: data[0], example: expected at least 2 words, the second to be told by the first",
        ),
        (
            'bt.train(net, ["the cat"], steps=1)',
            "BNetError: net: expected no random choice beneath the readouts: train follows one gradient",
        ),
        ('bt.train(dec, ["the cat"], steps=0)', "BNetError: steps: expected a whole number of at least 1"),
        ('bt.train(dec, ["the cat"], steps=1, epochs=1)', "BNetError: steps: expected steps= or epochs=, one of them"),
        ('bt.train(dec, ["the cat"])', "BNetError: steps: expected steps= or epochs=, one of them"),
        ('bt.train(dec, ["the cat"], steps=1, batch=0)', "BNetError: batch: expected a whole number of at least 1"),
        (
            'bt.train(dec, ["the cat"], steps=1, optimizer=bt.AdamW(rate=0))',
            "BNetError: rate: expected a finite number above 0",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, optimizer=bt.AdamW(rate=nan))',
            "BNetError: rate: expected a finite number above 0",
        ),
        ('bt.train(dec, ["the cat"], steps=1, smoothing=1)', "BNetError: smoothing: expected a share below 1"),
        (
            'bt.train(dec, ["the cat"], steps=1, optimizer=bt.AdamW(betas=(1, 2)))',
            "BNetError: betas: expected two numbers from 0 to below 1",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, optimizer=bt.AdamW(schedule="cos"))',
            "BNetError: schedule: expected one of the allowed values",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, optimizer=bt.AdamW(warmup=-1))',
            "BNetError: warmup: expected a whole number of at least 0",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, optimizer=bt.AdamW(clip=0))',
            "BNetError: clip: expected a finite number above 0",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, execution=bt.Execution(precision="half"))',
            "BNetError: precision: expected one of the allowed values",
        ),
        ('bt.train(dec, ["the cat"], steps=1, seed=2**63)', "BNetError: seed: expected a whole number below 2^63"),
        ('bt.train(dec, ["the cat"], steps=1, seed=-1)', "BNetError: seed: expected a whole number of at least 0"),
        (
            'bt.train(dec, ["the cat"], steps=1, device="cude")',
            "BNetError: device: expected a device of this machine that computes",
        ),
        ('bt.train(dec, ["the cat"], steps=1, loss="mse")', "BNetError: loss: expected a function loss(module, batch)"),
        (
            'bt.train(dec, ["the cat"], steps=1, loss=lambda module, batch: 1.0)',
            "BNetError: loss: expected one number: the mean over the batch, a tensor",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, loss=lambda module, batch: torch.tensor(nan))',
            "BNetError: loss: expected a tensor that follows from parameters that training changes",
        ),
        ('bt.train(dec, ["the cat"], steps=1, resume=True)', "BNetError: resume: expected an option of train"),
        (
            'bt.train(dec, ["the cat"], steps=1, checkpoints=text)',
            "FileError: …/a.txt: expected a folder for checkpoints",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, early_stopping=bt.EarlyStopping(patience=1))',
            "BNetError: patience: expected held_out= data to measure",
        ),
        (
            "bt.train(dec, lambda step: None, steps=1)",
            "BNetError: data: expected a list of sentences or of pairs, an array [sentence, word], a pair of arrays, a file of tokens",
        ),
        ("bt.train(dec, torch.tensor([[0, 9]]), steps=1)", "BNetError: data[0], sentence: expected ids from 0 to 2"),
        (
            "bt.train(dec, torch.tensor([[0.0, 1.0]]), steps=1)",
            "BNetError: data[0], sentence: expected text, a list of words, or ids",
        ),
        (
            "bt.train(vp, training.windows(torch.full((5, 3), nan), 2, 1), steps=1)",
            "BNetError: net: expected a readout to train on: a net without observe= has no likelihood",
        ),
        (
            "bt.train(vp, training.windows(torch.full((5, 3), inf), 2, 1), steps=1)",
            "BNetError: net: expected a readout to train on: a net without observe= has no likelihood",
        ),
        (
            'bt.train(dec, folder / "tokens.bin", steps=1)',
            "FileError: …/tokens.bin: expected a file of tokens: .npy, or .bin of uint16",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, start="dog")',
            "UnknownNameError: data[0], word of the sentence: expected a known name",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, progress="no")',
            "BNetError: progress: expected one of the allowed values",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, early_stopping=bt.EarlyStopping(bound=nan))',
            "BNetError: bound: expected a finite number",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, execution=bt.Execution(shard=True))',
            "BNetError: shard: expected several processes (torchrun --nproc-per-node 2)",
        ),
        ("bt.train(dec, (np.array(1), np.array(1)), steps=1)", "BNetError: data: expected arrays of one length"),
        (
            'bt.train(dec, torch.tensor([[0, 1]], device="meta"), steps=1)',
            "BNetError: data: expected arrays with a number in each place",
        ),
        (
            'bt.train(dec, np.array(["the cat", "cat sat"]), steps=1)',
            "works: an array of text is a list of it",
            "found.steps == 1",
        ),
        (
            'bt.train(dec, ["the cat"], steps=1, held_out=["the dgo"])',
            "UnknownNameError: held_out[0], word of the sentence: expected a known name",
        ),
        (
            'torch.no_grad()(bt.train)(dec, ["the cat"], steps=1)',
            "works: training has gradients, whoever calls it",
            "found.steps == 1",
        ),
    ],
    "training.kept": [
        ("training.kept(dec, folder)", "FileError: …/checkpoint.safetensors: expected a checkpoint of train"),
        ('training.kept(dec, folder / "no")', "FileError: …/no: expected a checkpoint of train"),
        ("training.kept(dec, None)", "FileError: path: expected the path of a file, a string or a Path"),
        ("training.kept(None, folder)", "BNetError: net: expected a net"),
        ("training.kept(dec, text)", "FileError: …/a.txt: expected a checkpoint of train"),
        ('training.kept(dec, folder, best="yes")', "BNetError: best: expected one of the allowed values"),
    ],
    "training.toy.copying": [
        ("toy.copying(0)", "BNetError: count: expected a whole number of at least 1"),
        ("toy.copying(2.0)", "BNetError: count: expected a whole number of at least 1"),
        ("toy.copying(2, length=0)", "BNetError: length: expected a whole number of at least 1"),
        (
            "toy.copying(2, symbols=1)",
            "BNetError: symbols: expected at least 2, of which 0 starts a target, and below 2^63",
        ),
        ("toy.copying(2, seed=2**63)", "BNetError: seed: expected a whole number below 2^63"),
        ("toy.copying(2, seed=2**64)", "BNetError: seed: expected a whole number below 2^63"),
        ("toy.copying(2, seed=-1)", "BNetError: seed: expected a whole number of at least 0"),
        (
            "toy.copying(2, symbols=2**63)",
            "BNetError: symbols: expected at least 2, of which 0 starts a target, and below 2^63",
        ),
        (
            "toy.copying(2, symbols=2**64)",
            "BNetError: symbols: expected at least 2, of which 0 starts a target, and below 2^63",
        ),
        ("toy.copying(10**15)", "BudgetError: ids: expected at most"),
    ],
    "training.toy.reversing": [
        ("toy.reversing(-1)", "BNetError: count: expected a whole number of at least 1"),
        ("toy.reversing(True)", "BNetError: count: expected a whole number of at least 1"),
        ('toy.reversing(2, length="3")', "BNetError: length: expected a whole number of at least 1"),
        ("toy.reversing(2, symbols=0)", "BNetError: symbols: expected a whole number of at least 1"),
        ("toy.reversing(2, seed=2**63)", "BNetError: seed: expected a whole number below 2^63"),
        ("toy.reversing(2, seed=2**64)", "BNetError: seed: expected a whole number below 2^63"),
    ],
    "training.toy.sorting": [
        ("toy.sorting(0)", "BNetError: count: expected a whole number of at least 1"),
        ("toy.sorting(None)", "BNetError: count: expected a whole number of at least 1"),
        ("toy.sorting(2, length=-1)", "BNetError: length: expected a whole number of at least 1"),
        ("toy.sorting(2, symbols=1.5)", "BNetError: symbols: expected a whole number of at least 1"),
        ("toy.sorting(2, seed=2**64)", "BNetError: seed: expected a whole number below 2^63"),
    ],
    "training.toy.dates": [
        ("toy.dates(0)", "BNetError: count: expected a whole number of at least 1"),
        ("toy.dates(2, seed=2**64)", "BNetError: seed: expected a whole number below 2^63"),
        ("toy.dates(2, seed=-1)", "BNetError: seed: expected a whole number of at least 0"),
        ('toy.dates("2")', "BNetError: count: expected a whole number of at least 1"),
        ("toy.dates(2.0)", "BNetError: count: expected a whole number of at least 1"),
        ("toy.dates(2, seed=None)", "BNetError: seed: expected a whole number of at least 0"),
    ],
}
