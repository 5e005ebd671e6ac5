"""The command line."""

ROWS = {
    "cli draw": [
        ('cli("draw", "the cat", "-o", folder / "a.xyz")', "exit 2: suffix of …/a.xyz: expected one that says how"),
        ('cli("draw", "the dgo", "-o", folder / "a.svg")', "exit 2: word of the sentence: expected a known name"),
        (
            'cli("draw", "the cat", "-o", folder / "no" / "a.svg")',
            "exit 2: …/no/a.svg: expected a folder that is there",
        ),
        ('cli("draw", "", "-o", folder / "a.svg")', "exit 2: SENTENCES: expected sentences with words"),
        (
            'cli("draw", "the cat", "-o", folder / "a.svg", "--slices", "9")',
            "exit 2: slices: expected numbers from 0 to 0",
        ),
        (
            'cli("draw", "-f", folder / "none.txt", "-o", folder / "a.svg")',
            "exit 2: --file …/none.txt: expected a file that can be read",
        ),
        (
            'cli("draw", "the cat", "-o", folder / "a.svg", "--min-weight", "nan")',
            "exit 2: min_weight: expected a finite number",
        ),
        ('cli("draw", "the cat", "-o", folder)', "exit 2: suffix of …: expected one that says how"),
    ],
    "cli explore": [
        ('cli("explore", "the cat", "-o", folder / "a.svg")', "exit 2: suffix of …/a.svg: expected one that says how"),
        ('cli("explore", "the cat")', "exit 2: -o: expected the page to write, or --open"),
        (
            'cli("explore", "the cat", "-o", folder / "a.html", "--posterior", "zz")',
            "exit 2: node: expected a known name",
        ),
        (
            'cli("explore", "the cat", "-o", folder / "a.html", "--heads", "99")',
            "exit 2: heads: expected a net with a plate of heads",
        ),
        (
            'cli("explore", "the cat", "-o", folder / "a.html", "--theme", "blue")',
            "exit 2: Invalid value for '--theme': 'blue' is not one of 'auto', 'light', 'dark'.",
        ),
    ],
    "cli sweep": [
        ('cli("sweep", "the cat", "cat the", "--at", "zz", "--answer", "the")', "exit 2: at: expected a known name"),
        ('cli("sweep", "the cat", "cat the")', "exit 2: sweep: expected --metric or --answer"),
        (
            'cli("sweep", "the cat", "--answer", "the")',
            "exit 2: SENTENCES: expected sentences in pairs, clean and corrupt: in a file with a tab between them",
        ),
        (
            'cli("sweep", "the cat", "cat the sat", "--metric", "c=0")',
            "exit 2: corrupt: expected sentences of 2 words, as clean",
        ),
        (
            'cli("sweep", "the cat", "cat the", "--metric", "c")',
            "exit 2: --metric: expected a node and its state or two, y_2=cat or y_2=cat,dog",
        ),
        (
            'cli("sweep", "the cat", "cat the", "--metric", "c=0", "--memory", "0")',
            "exit 2: Invalid value for '--memory': 0 is not in the range x>=1.",
        ),
    ],
    "cli fit": [
        (
            'cli("fit", "-f", text, "--steps", "0", "-o", folder / "a.fit")',
            "exit 2: steps: expected a whole number of at least 1",
        ),
        (
            'cli("fit", "no net here", "--observe", "label")',
            "exit 2: --observe: expected lines with a tab, and what is observed behind it",
        ),
        ('cli("fit", "-f", empty)', "exit 2: --file …/empty: expected sentences, one in each line"),
        (
            'cli("fit", "the cat sat", "--rate", "nan", "--steps", "1")',
            "exit 2: rate: expected a finite number above 0",
        ),
        (
            'cli("fit", "the cat sat", "--seed", 2**63, "--steps", "1")',
            "exit 2: seed: expected a whole number below 2^63",
        ),
        (
            'cli("fit", "the cat sat", "-o", folder / "no" / "a.fit", "--steps", "1")',
            "exit 2: …/no/a.fit: expected a folder that is there",
        ),
        ('cli("fit", "the cat sat", "--heads", "0")', "exit 2: heads: expected a whole number of at least 1"),
    ],
    "cli train": [
        ('cli("train", "the cat sat", "--steps", "0")', "exit 2: steps: expected a whole number of at least 1"),
        (
            'cli("train", "the cat sat", "--steps", "1", "--rate", "nan")',
            "exit 2: rate: expected a finite number above 0",
        ),
        (
            'cli("train", "the")',
            "exit 2: data[0], example: expected at least 2 words, the second to be told by the first",
        ),
        (
            'cli("train", "the cat sat", "--steps", "1", "--seed", 2**63)',
            "exit 2: seed: expected a whole number below 2^63",
        ),
        (
            'cli("train", "the cat sat", "--steps", "1", "--device", "cude")',
            "exit 2: device: expected a device of this machine that computes",
        ),
        (
            'cli("train", "the cat sat", "--steps", "1", "-o", folder / "no" / "a.safetensors")',
            "exit 2: …/no/a.safetensors: expected a folder that is there",
        ),
        ('cli("train", "the cat sat", "--heads", "3")', "exit 2: heads: expected a divisor of dim, which is 32"),
    ],
    "cli heads": [
        (
            'cli("heads", "the cat", "--model", "tiny")',
            "exit 2: net: expected heads that are summed: a plate of them that a later node reads",
        ),
        ('cli("heads", "the cat", "--model", text)', "exit 2: …/a.txt: expected a net that save wrote"),
        ('cli("heads", "the cat", "--interval", "2")', "exit 2: interval: expected a probability between 0 and 1"),
        ('cli("heads", "-f", empty)', "exit 2: --file …/empty: expected sentences, one in each line"),
        ('cli("heads", "the cat", "--seed", "-1")', "exit 2: seed: expected a whole number of at least 0"),
    ],
    "cli cost": [
        ('cli("cost", "--words", "0")', "exit 2: words: expected a whole number of at least 1"),
        (
            'cli("cost", "--words", "many")',
            "exit 2: --words: expected a whole number, or one for each stack (enc=20,dec=30)",
        ),
        ('cli("cost")', "exit 2: SENTENCES: expected sentences, or --file with some"),
        ('cli("cost", "--words", "3", "--want", "zz")', "exit 2: family: expected a known name"),
        (
            'cli("cost", "--words", "1" + "0" * 30)',
            "exit 2: words: expected so few words that FLOPs and bytes are below 2^63",
        ),
        ('cli("cost", "the cat", "--words", "3")', "exit 2: cost: expected sentences, or --words"),
    ],
    "cli bench": [
        ('cli("bench", "--folder", folder)', "exit 2: benchmarks: expected a clone with the folder benchmarks/"),
        ('cli("bench", "--json", "--markdown")', "exit 2: bench: expected --json or --markdown"),
        ('cli("bench", "-o", folder / "a.xyz")', "exit 2: suffix of …/a.xyz: expected one that says how"),
        ('cli("bench", "--folder", text)', "exit 2: benchmarks: expected a clone with the folder benchmarks/"),
        (
            'cli("bench", "no_such_row", "--folder", folder)',
            "exit 2: benchmarks: expected a clone with the folder benchmarks/",
        ),
    ],
    "cli models": [
        ('cli("models", "extra")', "exit 2: Got unexpected extra argument (extra)"),
        ('cli("models", "--jsno")', "exit 2: No such option '--jsno'. Did you mean '--json'?"),
        ('cli("models", "--json=1")', "exit 2: Option '--json' does not take a value."),
        ('cli("models", "-x")', "exit 2: No such option '-x'."),
        ('cli("models", "")', "exit 2: Got unexpected extra argument ()"),
    ],
    "cli completion": [
        (
            'cli("completion", "tcsh")',
            "exit 2: Invalid value for '{bash|zsh|fish}': 'tcsh' is not one of 'bash', 'zsh', 'fish'.",
        ),
        ('cli("completion")', "exit 2: Missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish"),
        (
            'cli("completion", "")',
            "exit 2: Invalid value for '{bash|zsh|fish}': '' is not one of 'bash', 'zsh', 'fish'.",
        ),
        (
            'cli("completion", "BASH ")',
            "exit 2: Invalid value for '{bash|zsh|fish}': 'BASH ' is not one of 'bash', 'zsh', 'fish'.",
        ),
        ('cli("completion", "bash", "zsh")', "exit 2: Got unexpected extra argument (zsh)"),
    ],
    "cli ask": [
        ('cli("ask", "posterior")', "exit 2: Missing argument 'NODE[,NODE]...'."),
        ('cli("ask", "posterior", "zz", "the cat")', "exit 2: node: expected a known name"),
        ('cli("ask", "posterior", "c", "the dgo")', "exit 2: word of the sentence: expected a known name"),
        ('cli("ask", "posterior", "x_1_0", "the cat")', "exit 2: x_1_0: expected a discrete random node"),
        ('cli("ask", "separated", "c", "c", "the cat")', "exit 2: separation of c: expected a node on one side"),
        ('cli("ask", "posterior", "c", "the cat", "--given", "y_0=purple")', "exit 2: y_0: expected one of its labels"),
        (
            'cli("ask", "posterior", "c", "the cat", "--model", "no-such-net")',
            "exit 2: source: expected a folder or a model that is local",
        ),
        ('cli("aks")', "exit 2: No such command 'aks'."),
        ('cli("ask", "posterior", "c", "a" * 9999)', "exit 2: word of the sentence: expected a known name"),
    ],
}
