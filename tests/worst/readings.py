"""Compiled, exact, Pyro, costs, equations."""

# ruff: noqa: E501

ROWS = {
    "compiler.Module": [
        ("compiler.Module(None)", "BNetError: net: expected a net"),
        ("compiler.Module(net)", "works: a net, as its network", "found.network is net.network"),
        ('compiler.Module("net")', "BNetError: net: expected a net"),
        ("compiler.Module(net.declaration)", "BNetError: net: expected a net"),
        (
            'compiler.Module(net.replace({"W_q_0.values": net.parameters["W_q_0.values"].double()}).network)',
            "BNetError: parameters: expected one floating type to compute in",
        ),
    ],
    "compiler.Module.forward": [
        ("module(None)", "BNetError: x: expected a value for every given node and stack"),
        ("module(torch.tensor([[0, 3]]))", "BNetError: x: expected ids from 0 to 2"),
        ("module(torch.tensor([[0, -1]]))", "BNetError: x: expected ids from 0 to 2"),
        ("module(torch.tensor([[0.0, 1.0]]))", "BNetError: x: expected whole numbers, the ids"),
        (
            "module(torch.eye(3).to_sparse())",
            "BNetError: x: expected [batch, word] ids or [batch, word, dim] vectors",
        ),
        ("module(torch.tensor([0, 1]))", "BNetError: x: expected [batch, word] ids or [batch, word, dim] vectors"),
        ("module(torch.zeros(0, 3, dtype=torch.int64))", "BNetError: x: expected at least one sentence"),
        ("module(torch.zeros(2, 0, dtype=torch.int64))", "BNetError: words: expected a whole number of at least 1"),
        ("module(ids, torch.ones(1, 3))", "BNetError: mask: expected booleans of shape (1, 3), true where a word is"),
        (
            "module(ids, torch.zeros(1, 3, dtype=torch.bool))",
            "BNetError: mask, sentence 0: expected at least one word that is present",
        ),
        (
            "module(ids, torch.ones(3, 1, dtype=torch.bool))",
            "BNetError: mask: expected booleans of shape (1, 3), true where a word is",
        ),
        ('module(ids, want="y")', "BNetError: want: expected a list of families"),
        ('module(ids, want=["zz"])', "UnknownNameError: family: expected a known name"),
        ("module(ids, want=[])", "works: nothing was asked for", "found == {}"),
        ('module(ids, do={"c": 1})', "BNetError: do['c']: expected a tensor"),
        ('module(ids, do={"c": torch.tensor(3)})', "BNetError: do['c']: expected states from 0 to 2"),
        (
            'module(ids, do={"q_0": torch.zeros(2, 2)})',
            "BNetError: do['q_0']: expected [batch, word, 4] of shape (1, 3, 4)",
        ),
        ('module(ids, do={"zz": torch.tensor(1)})', "UnknownNameError: family: expected a known name"),
        ('module(ids, given={"x_0": torch.zeros(1, 3, 4)})', "BNetError: given['x_0']: expected a node that is given"),
        ('module("the cat sat")', "BNetError: x: expected [batch, word] ids or [batch, word, dim] vectors"),
        ("module(ids.numpy())", "BNetError: x: expected [batch, word] ids or [batch, word, dim] vectors"),
        ("module([[0, 1, 2]])", "BNetError: x: expected [batch, word] ids or [batch, word, dim] vectors"),
        ("module(ids.expand(2, 3)).shape", "works: an expanded tensor, read as what it shows", "found == (3, 2, 3, 3)"),
        ("module(ids.to(torch.uint8)).shape", "works: ids of any whole type", "found == (3, 1, 3, 3)"),
        ("module(ids.to(torch.bool))", "BNetError: x: expected whole numbers, the ids"),
    ],
    "compiler.Module.readings": [
        ('module.readings(ids, of=["zz"])', "UnknownNameError: family that reads words: expected a known name"),
        ('module.readings(ids, of=["q_0"])', "UnknownNameError: family that reads words: expected a known name"),
        ('module.readings(ids, of="x_1")', "BNetError: want: expected a list of families"),
        ("module.readings(None)", "BNetError: x: expected a value for every given node and stack"),
        (
            "module.readings(ids, torch.ones(1, 2, dtype=torch.bool))",
            "BNetError: mask: expected booleans of shape (1, 3), true where a word is",
        ),
        ("module.readings(ids, of=[])", "works: nothing was asked for", "found == ({}, {})"),
        ('module.readings(ids, want=["zz"])', "UnknownNameError: family: expected a known name"),
    ],
    "compiler.network_to_plan": [
        (
            'compiler.network_to_plan(net, ["y"])',
            "works: a net, as its network",
            "found == compiler.network_to_plan(net.network, ['y'])",
        ),
        ('compiler.network_to_plan(net.network, ["zz"])', "UnknownNameError: family: expected a known name"),
        ('compiler.network_to_plan(net.network, "y")', "BNetError: want: expected a list of families"),
        ("compiler.network_to_plan(net.network, [])", "works: a plan of nothing", "found.groups == ()"),
        (
            'compiler.network_to_plan(net.network, ["y"], known=[99])',
            "BNetError: known, enumerate_too: expected numbers of families, from 0 to 10",
        ),
        (
            'compiler.network_to_plan(net.network, ["y"], known=["c"])',
            "BNetError: known, enumerate_too: expected numbers of families, from 0 to 10",
        ),
        ("compiler.network_to_plan(net.network, None)", "BNetError: want: expected a list of families"),
        (
            'compiler.network_to_plan(net.network, ["y"], enumerate_too=[99])',
            "BNetError: known, enumerate_too: expected numbers of families, from 0 to 10",
        ),
    ],
    "inference.log_evidence": [
        ("inference.log_evidence(module, {}, ids)", "works: nothing is seen: log 1", "found.tolist() == [0]"),
        (
            'inference.log_evidence(module, {"y": torch.tensor([[0, 1, 2]])}, ids)',
            "BNetError: evidence['y']: expected Evidence(value, observed)",
        ),
        (
            'inference.log_evidence(module, {"y": inference.Evidence(torch.tensor([[0, 1, 3]]))}, ids)',
            "BNetError: evidence['y']: expected states from 0 to 2",
        ),
        (
            'inference.log_evidence(module, {"y": inference.Evidence(torch.tensor([[0, 1]]))}, ids)',
            "BNetError: evidence['y']: expected [batch, word] of shape (1, 3)",
        ),
        (
            'inference.log_evidence(module, {"z": inference.Evidence(torch.tensor([[0, 1, 2]]))}, ids)',
            "UnknownNameError: family: expected a known name",
        ),
        (
            'inference.log_evidence(net, {"y": inference.Evidence(torch.tensor([[0, 1, 2]]))}, ids)',
            "BNetError: module: expected a compiled net",
        ),
        (
            'inference.log_evidence(module, {"y": inference.Evidence(torch.tensor([[0, 1, 2]]))}, ids, budget=1)',
            "BudgetError: exact elimination for y: expected at most 1 joint states for each sentence (c)",
        ),
        (
            'inference.log_evidence(module, {"y": inference.Evidence(torch.tensor([[0, 1, 2]]))}, ids, budget=0)',
            "BNetError: budget: expected a whole number of at least 1",
        ),
        (
            'inference.log_evidence(module, {"y": inference.Evidence(torch.tensor([[0, 1, 2]]))}, ids, atol=nan)',
            "BNetError: atol: expected a finite number",
        ),
        (
            'inference.log_evidence(module, {"y": inference.Evidence(torch.tensor([[0.0, 1, 2]]))}, ids)',
            "BNetError: evidence['y']: expected whole numbers, the states",
        ),
        (
            'inference.log_evidence(module, {"y": inference.Evidence(torch.tensor([[0, 1, 2]]), torch.ones(1, 3))}, ids)',
            "BNetError: evidence['y'].observed: expected booleans of shape (1, 3), true where it was seen",
        ),
        (
            'inference.log_evidence(module, {"x_1": inference.Evidence(torch.zeros(1, 3, 4))}, ids)',
            "EvidenceError: x_1_0: expected evidence that some state of the net makes possible",
        ),
        (
            'inference.log_evidence(module, {"x_1": inference.Evidence(torch.full((1, 3, 4), nan))}, ids)',
            "EvidenceError: x_1_0: expected finite numbers",
        ),
        ("inference.log_evidence(module, None, ids)", "works: nothing is seen: log 1", "found.tolist() == [0]"),
        (
            'inference.log_evidence(module, {"y": inference.Evidence(torch.tensor([[0, 1, 2]]))}, ids, atol=-1.0)',
            "BNetError: atol: expected a finite number of at least 0",
        ),
    ],
    "inference.posterior": [
        ('inference.posterior(module, "zz", {}, ids)', "UnknownNameError: family: expected a known name"),
        ('inference.posterior(module, "x_1", {}, ids)', "BNetError: x_1: expected a discrete family"),
        ('inference.posterior(module, "", {}, ids)', "UnknownNameError: family: expected a known name"),
        (
            'inference.posterior(module, "c", None, ids)',
            "works: the prior",
            "bool(torch.allclose(found, torch.full((1, 3), 1 / 3)))",
        ),
        (
            'inference.posterior(module, "c", {"c": inference.Evidence(torch.tensor([5]))}, ids)',
            "BNetError: evidence['c']: expected states from 0 to 2",
        ),
        (
            'inference.posterior(module, "c", {}, ids, do={"c": torch.tensor(1)})',
            "BNetError: c: expected a family that is still random",
        ),
        ('inference.posterior(None, "c", {}, ids)', "BNetError: module: expected a compiled net"),
        (
            'inference.posterior(module, "c", {}, ids, budget=2)',
            "BudgetError: exact elimination for c: expected at most 2 joint states for each sentence (c)",
        ),
        (
            'inference.posterior(module, "c", {}, ids, torch.zeros(1, 3, dtype=torch.bool))',
            "BNetError: mask, sentence 0: expected at least one word that is present",
        ),
        (
            'inference.posterior(module, "c", {"x_1": inference.Evidence(torch.zeros(1, 3, 4))}, ids)',
            "EvidenceError: x_1_0: expected evidence that some state of the net makes possible",
        ),
    ],
    "inference.Evidence": [
        (
            'inference.posterior(module, "c", {"y": inference.Evidence(None)}, ids)',
            "BNetError: evidence['y']: expected a tensor",
        ),
        (
            'inference.posterior(module, "c", {"y": inference.Evidence([[0, 1, 2]])}, ids)',
            "BNetError: evidence['y']: expected a tensor",
        ),
        (
            'inference.posterior(module, "c", {"y": inference.Evidence(torch.tensor([[0, 1, 2]]), [True])}, ids)',
            "BNetError: evidence['y'].observed: expected booleans of shape (1, 3), true where it was seen",
        ),
        (
            'inference.posterior(module, "c", {"y": inference.Evidence(torch.tensor([[0, 1, 2]]), torch.ones(1, 2, dtype=torch.bool))}, ids)',
            "BNetError: evidence['y'].observed: expected booleans of shape (1, 3), true where it was seen",
        ),
        (
            'inference.posterior(module, "c", {"y": inference.Evidence(torch.tensor([[0, 9, 2]]), torch.tensor([[True, False, True]]))}, ids)',
            "works: what is not observed is not looked at",
            "found.equal(inference.posterior(module, 'c', {'y': inference.Evidence(torch.tensor([[0, 1, 2]]), torch.tensor([[True, False, True]]))}, ids))",
        ),
        (
            'inference.posterior(module, "c", {"y": torch.tensor([[0, 1, 2]])}, ids)',
            "BNetError: evidence['y']: expected Evidence(value, observed)",
        ),
    ],
    "BNet.pyro": [
        ('net.pyro("fitted")', "BNetError: parameters: expected one of the allowed values"),
        ("net.pyro(None)", "BNetError: parameters: expected one of the allowed values"),
        ("net.pyro(True)", "BNetError: parameters: expected one of the allowed values"),
        ('net.pyro(["own"])', "BNetError: parameters: expected one of the allowed values"),
        ('net.pyro("own")', "works: a net without priors has the same sites", "found.sites == net.pyro().sites"),
    ],
    "pyro_reading.pyro_model": [
        ("pyro_reading.pyro_model(None)", "BNetError: net: expected a net"),
        ("pyro_reading.pyro_model(net)", "works: a net, as its network", "found.network is net.network"),
        ('pyro_reading.pyro_model("net")', "BNetError: net: expected a net"),
        ("pyro_reading.pyro_model(net.declaration)", "BNetError: net: expected a net"),
        ("pyro_reading.pyro_model(7)", "BNetError: net: expected a net"),
    ],
    "pyro_reading.PyroModel": [
        ("net.pyro()(None)", "BNetError: x: expected a value for every given node and stack"),
        ("net.pyro()(torch.tensor([[0, 7]]))", "BNetError: x: expected ids from 0 to 2"),
        ('net.pyro()(ids, {"y": torch.tensor([[0, 1, 5]])})', "BNetError: y['y']: expected states from 0 to 2"),
        ('net.pyro()(ids, {"z": torch.tensor([[0, 1, 2]])})', "UnknownNameError: y: expected a known name"),
        ('net.pyro()("the cat")', "BNetError: x: expected [batch, word] ids or [batch, word, dim] vectors"),
        ("net.pyro()(ids, torch.tensor([[0, 1]]))", "BNetError: y['y']: expected shape (1, 3)"),
        ("pyro_reading.PyroModel(None)", "BNetError: net: expected a net"),
    ],
    "pyro_reading.PyroModel.data": [
        ("net.pyro().data(None)", "works: no data", "found == {}"),
        ('net.pyro().data({"zz": torch.zeros(1)})', "UnknownNameError: site: expected a known name"),
        ('net.pyro().data({"y": "the"})', "BNetError: data['y']: expected a tensor"),
        ('net.pyro().data({"y": torch.tensor([[0, 1, 9]])})', "BNetError: data['y']: expected states from 0 to 2"),
        ('net.pyro().data({"x_1": torch.zeros(2)})', "UnknownNameError: site: expected a known name"),
        ("net.pyro().data([1])", "BNetError: data: expected a mapping from names"),
        ('net.pyro().data({"y": torch.zeros(1, 2, 3, 4)})', "BNetError: data['y']: expected whole numbers, the states"),
        ('net.pyro().data({"y": None})', "BNetError: data['y']: expected a tensor"),
    ],
    "cost.cost": [
        ("cost.cost(net, 3)", "works: a net, as its network", "found == net.cost(3)"),
        ("cost.cost(net.network, 0)", "BNetError: words: expected a whole number of at least 1"),
        ("cost.cost(None, 3)", "BNetError: net: expected a net"),
        ('cost.cost(net.network, "3")', "BNetError: words: expected a whole number of at least 1"),
        ("cost.cost(net.network, 3, 0)", "BNetError: batch: expected a whole number of at least 1"),
        ('cost.cost(net.network, 3, 1, ["x_9"])', "UnknownNameError: family: expected a known name"),
        ('cost.cost(net.network, {"": 0})', "BNetError: words of '': expected a whole number of at least 1"),
        (
            "cost.cost(net.network, 10**30)",
            "BNetError: words: expected so few words that FLOPs and bytes are below 2^63",
        ),
    ],
    "equations.equations": [
        ("equations.equations(net)", "works: a net, as its network", "found == net.equations()"),
        ("equations.equations(None)", "BNetError: net: expected a net"),
        ('equations.equations(net.network, "worde")', "BNetError: form: expected one of the allowed values"),
        ("equations.equations(net.network, None)", "BNetError: form: expected one of the allowed values"),
        ("equations.equations(net.declaration)", "BNetError: net: expected a net"),
        ("equations.equations(net, 3)", "BNetError: form: expected one of the allowed values"),
    ],
    "equations.Equations": [
        ('net.equations()["zz"]', "UnknownNameError: equation: expected a known name"),
        ("net.equations()[None]", "UnknownNameError: equation: expected a known name"),
        ('net.equations()["q_0"]', "UnknownNameError: equation: expected a known name"),
        ('net.equations()[""]', "UnknownNameError: equation: expected a known name"),
        ("net.equations()[10**9]", "UnknownNameError: equation: expected a known name"),
    ],
}
