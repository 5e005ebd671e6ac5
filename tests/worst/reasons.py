"""Why some public names have no rows."""

RESULT = "a result: the package makes it"
RECORD = "a record that the package makes and hands out"
CALLED = "called by the package, with values that it has checked; what one of one's own gives back: rows of `tpm.TPM`"
ERROR = "raised by the package"
CONFIG = "options of `fit` and `train`, where they have rows"

REASONS = {
    **dict.fromkeys(
        [
            *("inference.Samples", "graph.Separation", "graph.Trail", "inference.Counterfactual", "inference.Path"),
            *("inference.Reads", "inference.Tan", "inference.TanTree", "inference.CorpusTan", "inference.Inclusion"),
            *("inference.Damage", "inference.heads.Roles", "inference.circuits.Circuit", "graph.Quotient"),
            "viz.Picture",
            *("inference.sweeps.Sweep", "inference.sweeps.Mediation", "training.Trained", "training.Generated"),
            *("Fit", "inference.fit.Heads", "inference.fit.Comparison", "inference.fit.Check"),
            *("cost.Cost", "cost.SliceCost", "cost.Row", "cost.Polynomial", "equations.Equation"),
        ],
        RESULT,
    ),
    **dict.fromkeys(
        [
            *("data.Batch", "data.Dataset", "compiler.Plan", "tpm.At", "tpm.Parent"),
            *(f"data.Batch.{name}" for name in ("parts", "repeat", "to")),
        ],
        RECORD,
    ),
    **dict.fromkeys(
        [
            *("tpm.TPM.distribution", "tpm.TPM.emit", "tpm.TPM.latex", "tpm.TPM.log_prob", "tpm.TPM.logits"),
            *("tpm.TPM.parameters", "tpm.TPM.products", "tpm.TPM.reading", "tpm.TPM.shape", "tpm.TPM.value"),
            "tpm.Product",
        ],
        CALLED,
    ),
    **dict.fromkeys(
        [
            *("BNetError", "UnknownNameError", "DeclarationError", "EvidenceError", "ReadingError", "BudgetError"),
            "FileError",
        ],
        ERROR,
    ),
    **dict.fromkeys(
        ["MAP", "EM", "SVI", "NUTS", "AdamW", "EarlyStopping", "Execution", "Checkpoints"],
        CONFIG,
    ),
    "Sentence": "`net.sentence` makes it",
    "inference.fit.explain_fit": "the arguments of `fit`, refused as `fit` refuses them",
    "pretrained.Family": "a table of an adapter's own; `register` reads it",
    "pretrained.Where": "a table of an adapter's own; `register` reads it",
    "equations.Equations": RESULT,
    **dict.fromkeys(
        [
            "explain",
            "Sentence.explain",
            "inference.sweeps.explain_sweep",
        ],
        "the arguments of the function that it names, refused as that refuses them",
    ),
    **dict.fromkeys(
        [
            "inference.Route",
            "inference.Reads.draw",
            "inference.Reads.picture",
            "inference.Tan.draw",
            "inference.Tan.picture",
            "inference.TanTree.draw",
            "inference.TanTree.picture",
            "compiler.Module.run",
            "compiler.Request",
            "inference.SentenceState",
            "inference.SentenceState.labels",
            "inference.SentenceState.query",
            "inference.SentenceState.posterior_query",
            "inference.SentenceState.resolve_interventions",
            "inference.SentenceState.selection",
            "inference.SentenceState.with_evidence",
            "inference.SentenceState.with_interventions",
            "inference.SentenceState.without_interventions",
        ],
        RECORD,
    ),
}
