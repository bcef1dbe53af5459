"""How code can read a value that may change between two processes: NUMBER in the texts below."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Way:
    """How code reads a value."""

    name: str
    value: str
    """An expression."""
    prelude: str = ""
    """Code at the top of the module."""
    inside: str = ""
    """Code in the function, before the expression."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the package that replace those of `OTHERS`, which contain other numbers."""
    environ: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    """A part of the reason, if this cannot be followed and graphs are not cached."""


_RULES: Final = "SCALE = 7.0\ndef scale():\n    return SCALE\n"
_CHANGED: Final = "SCALE = NUMBER\ndef scale():\n    return SCALE\n"
OTHERS: Final = {
    "mutated/__init__.py": "",
    "mutated/rules.py": _RULES,
    "mutated/deep/__init__.py": "",
    "mutated/deep/deeper/__init__.py": "",
    "mutated/deep/deeper/rules.py": _RULES,
}
_IN_RULES: Final = {"mutated/rules.py": _CHANGED}
_DEEP: Final = {"mutated/deep/deeper/rules.py": _CHANGED}
_IMPORT_RULES: Final = "import mutated.rules\nfrom mutated import rules\n"


def _written(name: str, value: str, prelude: str, *, refusal: str = "") -> Way:
    """Return a way to a number in the module itself."""
    return Way(name, value, textwrap.dedent(prelude).strip(), refusal=refusal)


def _from_rules(name: str, value: str, prelude: str = "", inside: str = "", *, refusal: str = "") -> Way:
    """Return a way to a number in the module `rules` of the package."""
    return Way(name, value, prelude, inside, files=_IN_RULES, refusal=refusal)


# The first are tried everywhere, all of them in a backward.
COMMON: Final = (
    _written("a global", "G", "G = NUMBER"),
    _from_rules("a function of another module", "rules.scale()", _IMPORT_RULES),
    _from_rules("attributes of attributes", "mutated.rules.SCALE", _IMPORT_RULES),
    _from_rules("an import from inside", "scale()", inside="from mutated.rules import scale"),
    _written(
        "a closure's cell",
        "read()",
        """
        def make(held):
            return lambda: held
        read = make(NUMBER)
        """,
    ),
    _from_rules(
        "a module in a closure's cell",
        "read()",
        "def make():\n    from mutated import rules\n    return lambda: rules.SCALE\nread = make()",
    ),
    _written(
        "a method",
        "Table().read()",
        """
        class Table:
            def read(self):
                return NUMBER
        """,
    ),
    Way(
        "the environment",
        "float(os.environ['MUTATED'])",
        "import os",
        environ={"MUTATED": "NUMBER"},
        refusal="os._Environ",
    ),
)

MODULES: Final = (
    _from_rules("a name of another module", "rules.SCALE", _IMPORT_RULES),
    _from_rules("a function at the end of attributes", "mutated.rules.scale()", _IMPORT_RULES),
    Way("three attributes", "mutated.deep.deeper.rules.SCALE", "import mutated.deep.deeper.rules", files=_DEEP),
    Way(
        "a function at their end", "mutated.deep.deeper.rules.scale()", "import mutated.deep.deeper.rules", files=_DEEP
    ),
    _from_rules("an import inside", "mutated.rules.SCALE", inside="import mutated.rules"),
    _from_rules("an import inside under a name", "r.scale()", inside="import mutated.rules as r"),
    Way("a deep import under a name", "r.scale()", inside="import mutated.deep.deeper.rules as r", files=_DEEP),
    _from_rules("a relative import inside", "scale()", inside="from .rules import scale"),
    _from_rules("a module by a relative import", "rules.scale()", inside="from . import rules"),
    _from_rules("a name from inside under a name", "s", inside="from mutated.rules import SCALE as s"),
    _from_rules("a local name for a module", "m.SCALE", _IMPORT_RULES, inside="m = rules"),
    _from_rules("a module as an argument", "read(rules)", _IMPORT_RULES + "def read(m):\n    return m.SCALE"),
    _from_rules("a module in a dict", "T['rules'].SCALE", _IMPORT_RULES + "T = {'rules': rules}"),
    _from_rules("a module in a list", "[m.SCALE for m in T][0]", _IMPORT_RULES + "T = [rules]"),
    _from_rules("one of two modules", "(rules if x is not None else math).SCALE", _IMPORT_RULES + "import math\nx = 1"),
    _from_rules("a module as a default", "read()", _IMPORT_RULES + "def read(m=rules):\n    return m.SCALE"),
    _from_rules(
        "a module on an object", "T.rules.scale()", _IMPORT_RULES + "class T:\n    pass\nT = T()\nT.rules = rules"
    ),
    _from_rules("all names of a module", "SCALE", "from mutated.rules import *"),
    Way(
        "a module that computes names",
        "rules.OTHER",
        _IMPORT_RULES,
        files={"mutated/rules.py": "def __getattr__(name):\n    return NUMBER"},
        refusal="which the module computes when it is read",
    ),
    Way(
        "a module that changes another",
        "rules.SCALE",
        "import mutated.deep\nfrom mutated import rules",
        files={"mutated/deep/__init__.py": "import mutated.rules\nmutated.rules.SCALE = NUMBER"},
    ),
    _from_rules(
        "importlib",
        "importlib.import_module('mutated.rules').SCALE",
        "import importlib",
        refusal="importlib.import_module",
    ),
    _from_rules(
        "sys.modules", "sys.modules['mutated.rules'].SCALE", "import sys\nimport mutated.rules", refusal="sys.modules"
    ),
    _from_rules("__import__", "__import__('mutated.rules').rules.SCALE", refusal="builtins.__import__"),
)

FUNCTIONS: Final = (
    _written("a helper", "read()", "def read():\n    return NUMBER"),
    _written("a helper's helper", "read()", "def below():\n    return NUMBER\ndef read():\n    return below()"),
    _written("a default", "read()", "def read(held=NUMBER):\n    return held"),
    _written("a default of a keyword", "read()", "def read(*, held=NUMBER):\n    return held"),
    _written("an attribute of a function", "read.held", "def read():\n    pass\nread.held = NUMBER"),
    _written("a lambda", "read()", "read = lambda: NUMBER"),
    _written(
        "a nested function", "read()", "G = NUMBER\ndef read():\n    def below():\n        return G\n    return below()"
    ),
    _written("a comprehension", "read()", "G = NUMBER\ndef read():\n    return [G for _ in range(1)][0]"),
    _written("a generator", "read()", "G = NUMBER\ndef read():\n    return sum(G for _ in range(1))"),
    _written(
        "an exception's handler",
        "read()",
        "def read():\n    try:\n        raise ValueError\n    except ValueError:\n        return NUMBER",
    ),
    _written(
        "a partial", "read()", "import functools\ndef below(a):\n    return a\nread = functools.partial(below, NUMBER)"
    ),
    _written(
        "a partial by keyword",
        "read()",
        "import functools\ndef below(a):\n    return a\nread = functools.partial(below, a=NUMBER)",
    ),
    _written("a cached function", "read()", "import functools\n@functools.lru_cache\ndef read():\n    return NUMBER"),
    _written(
        "a decorated function",
        "read()",
        """
        import functools
        def times(function):
            @functools.wraps(function)
            def inner():
                return function() * NUMBER
            return inner
        @times
        def read():
            return 1.0
        """,
    ),
    _written(
        "a context manager",
        "read()",
        """
        import contextlib
        @contextlib.contextmanager
        def manager():
            yield NUMBER
        def read():
            with manager() as held:
                return held
        """,
    ),
    _written("a function under no_grad", "read()", "@torch.no_grad()\ndef read():\n    return NUMBER"),
    _written("a bound method", "read()", "class T:\n    def held(self):\n        return NUMBER\nread = T().held"),
    _written("a method of a builtin", "read('a')", "read = {'a': NUMBER}.get"),
    _written("arguments by name", "read(a=NUMBER, b=1.0)", "def read(a, b):\n    return a + b"),
    _written("a function in a dict", "T['a']()", "T = {'a': lambda: NUMBER}"),
)

OBJECTS: Final = (
    _written("a dict", "T['a']", "T = {'a': NUMBER}"),
    _written("a list", "T[0]", "T = [NUMBER]"),
    _written("a tuple in a list", "T[0][1]", "T = [(1, NUMBER)]"),
    _written("a set", "max(T)", "T = {1.0, NUMBER}"),
    _written("an attribute of a class", "T.held", "class T:\n    held = NUMBER"),
    _written("an attribute of a base", "T.held", "class B:\n    held = NUMBER\nclass T(B):\n    pass"),
    _written("a static method", "T.read()", "class T:\n    @staticmethod\n    def read():\n        return NUMBER"),
    _written(
        "a class method",
        "T.read()",
        "class T:\n    held = NUMBER\n    @classmethod\n    def read(cls):\n        return cls.held",
    ),
    _written("a property", "T().held", "class T:\n    @property\n    def held(self):\n        return NUMBER"),
    _written(
        "a cached property",
        "T().held",
        "import functools\nclass T:\n    @functools.cached_property\n    def held(self):\n        return NUMBER",
    ),
    _written("an object", "T.held", "class T:\n    pass\nT = T()\nT.held = NUMBER"),
    _written("an object that is called", "T()", "class T:\n    def __call__(self):\n        return NUMBER\nT = T()"),
    _written(
        "an object of a class with slots", "T.held", "class T:\n    __slots__ = ('held',)\nT = T()\nT.held = NUMBER"
    ),
    _written(
        "a dataclass", "T.held", "import dataclasses\n@dataclasses.dataclass\nclass T:\n    held: float\nT = T(NUMBER)"
    ),
    _written(
        "a default of a dataclass",
        "T().held",
        "import dataclasses\n@dataclasses.dataclass\nclass T:\n    held: float = NUMBER",
    ),
    _written("a named tuple", "T.held", "import collections\nT = collections.namedtuple('T', 'held')(NUMBER)"),
    _written("a member of an enumeration", "T.A.value", "import enum\nclass T(enum.Enum):\n    A = NUMBER"),
    _written("a simple namespace", "T.held", "import types\nT = types.SimpleNamespace(held=NUMBER)"),
    _written("a number with a class", "float(T)", "class T(float):\n    pass\nT = T(NUMBER)"),
    _written(
        "a metaclass",
        "T.held",
        "class M(type):\n    @property\n    def held(cls):\n        return NUMBER\nclass T(metaclass=M):\n    pass",
    ),
    _written("__getattr__", "T().held", "class T:\n    def __getattr__(self, name):\n        return NUMBER"),
    _written(
        "super",
        "T().read()",
        "class B:\n    def read(self):\n        return NUMBER\n"
        "class T(B):\n    def read(self):\n        return super().read()",
    ),
    _written(
        "a class made inside", "read()", "G = NUMBER\ndef read():\n    class T:\n        held = G\n    return T.held"
    ),
    _written("a defaultdict", "T['x']", "import collections\nT = collections.defaultdict(lambda: NUMBER)"),
)

TORCH: Final = (
    _written("an attribute set on torch", "torch.mutated", "torch.mutated = NUMBER"),
    _written(
        "an attribute set on a module of torch",
        "torch.nn.functional.mutated()",
        "torch.nn.functional.mutated = lambda: NUMBER",
    ),
    _written(
        "an attribute set on a module by a local name",
        "F.mutated",
        "torch.nn.functional.mutated = NUMBER\nimport torch.nn.functional as F",
    ),
    _written(
        "a method set on tensors", "torch.ones(()).mutated()", "torch.Tensor.mutated = lambda self: self * NUMBER"
    ),
    _written(
        "a replaced function of torch",
        "torch.special.erfcx(torch.zeros(()))",
        "import torch.special\ntorch.special.erfcx = lambda x: x + NUMBER",
    ),
    _written(
        "a wrapped function of torch",
        "torch.nn.functional.softsign(torch.ones(()))",
        """
        import functools
        plain = torch.nn.functional.softsign
        @functools.wraps(plain)
        def softsign(x):
            return x * NUMBER
        torch.nn.functional.softsign = softsign
        """,
    ),
    _written("an attribute set on math", "math.mutated", "import math\nmath.mutated = NUMBER"),
    _written("a patched builtin", "MUTATED", "import builtins\nbuiltins.MUTATED = NUMBER"),
    _written("a replaced builtin", "abs(1.0)", "import builtins\nbuiltins.abs = lambda x: NUMBER"),
    _written(
        "a hidden operator",
        "hidden(torch.ones(()))",
        """
        @torch.library.custom_op("mutated::hidden", mutates_args=())
        def hidden(x: torch.Tensor) -> torch.Tensor:
            return x * NUMBER
        @hidden.register_fake
        def _(x):
            return torch.empty_like(x)
        """,
    ),
    _written(
        "a hidden operator of a library",
        "torch.ops.mutated.inner(torch.ones(()))",
        """
        library = torch.library.Library("mutated", "FRAGMENT")
        library.define("inner(Tensor x) -> Tensor")
        library.impl("inner", lambda x: x * NUMBER, "CompositeImplicitAutograd")
        """,
        refusal="mutated::inner",
    ),
    _written(
        "a namespace by a local name",
        "read(torch.ops.mutated)",
        """
        library = torch.library.Library("mutated", "FRAGMENT")
        library.define("inner(Tensor x) -> Tensor")
        library.impl("inner", lambda x: x * NUMBER, "CompositeImplicitAutograd")
        def read(operators):
            return operators.inner(torch.ones(()))
        """,
        refusal="mutated::inner",
    ),
    _written(
        "an autograd function",
        "Times.apply(torch.ones(()))",
        """
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * NUMBER
            @staticmethod
            def backward(ctx, g):
                return g
        """,
    ),
)

HIDDEN: Final = (
    _written("globals()", "globals()['G']", "G = NUMBER", refusal="builtins.globals"),
    _written("eval", "eval('G')", "G = NUMBER", refusal="builtins.eval"),
    _written(
        "exec",
        "read()",
        "G = NUMBER\ndef read():\n    d = {}\n    exec('v = G', globals(), d)\n    return d['v']",
        refusal="builtins.exec",
    ),
    _from_rules("vars", "vars(rules)['SCALE']", _IMPORT_RULES, refusal="builtins.vars"),
    _from_rules("__dict__", "rules.__dict__['SCALE']", _IMPORT_RULES, refusal="__dict__"),
    _written("__globals__", "read.__globals__['G']", "G = NUMBER\ndef read():\n    pass", refusal="__globals__"),
    _from_rules("getattr with a name", "getattr(rules, 'SCALE')", _IMPORT_RULES),
    _from_rules(
        "getattr with a computed name",
        "getattr(rules, 'SC' + N)",
        _IMPORT_RULES + "N = 'ALE'",
        refusal="builtins.getattr",
    ),
    _from_rules(
        "getattr under a name", "read(rules, 'SCALE')", _IMPORT_RULES + "read = getattr", refusal="builtins.getattr"
    ),
    _from_rules(
        "attrgetter",
        "operator.attrgetter('SCALE')(rules)",
        _IMPORT_RULES + "import operator",
        refusal="operator.attrgetter",
    ),
    Way("getenv", "float(os.getenv('MUTATED'))", "import os", environ={"MUTATED": "NUMBER"}, refusal="os._Environ"),
    Way(
        "the environment by its name",
        "float(environ['MUTATED'])",
        "from os import environ",
        environ={"MUTATED": "NUMBER"},
        refusal="os._Environ",
    ),
    Way(
        "the environment by an import inside",
        "float(os.environ['MUTATED'])",
        inside="import os",
        environ={"MUTATED": "NUMBER"},
        refusal="os._Environ",
    ),
    Way(
        "a file",
        "float(open(PATH).read())",
        "import os\nPATH = os.path.dirname(__file__) + '/../held'",
        files={"held": "NUMBER"},
        refusal="io.open",
    ),
    Way(
        "a file by its path",
        "float(PATH.read_text())",
        "import pathlib\nPATH = pathlib.Path(__file__).parents[1] / 'held'",
        files={"held": "NUMBER"},
        refusal="PosixPath",
    ),
    _written(
        "a context variable",
        "C.get()",
        "import contextvars\nC = contextvars.ContextVar('C', default=NUMBER)",
        refusal="_contextvars.ContextVar",
    ),
    _written(
        "a thread's local",
        "T.held",
        "import threading\nT = threading.local()\nT.held = NUMBER",
        refusal="_thread._local",
    ),
    _written("an iterator", "next(T)", "T = iter([NUMBER] * 1000)", refusal="builtins.list_iterator"),
    _written("a frame", "sys._getframe().f_globals['G']", "import sys\nG = NUMBER", refusal="f_globals"),
)

_CLASSES: Final = "import abc\nclass T(abc.ABC):\n    pass\nclass A:\n    pass\nclass B:\n    pass\n"
_FIELD: Final = "import dataclasses\nfrom dataclasses import field\n@dataclasses.dataclass\nclass T:\n"

# What Python keeps about classes besides their attributes.
CLASSES: Final = (
    _written(
        "metadata of a field",
        "dataclasses.fields(T)[0].metadata['a']",
        _FIELD + "    held: float = field(default=0.0, metadata={'a': NUMBER})",
    ),
    _written(
        "whether a field is in the repr",
        "float(len(repr(T())))",
        _FIELD + "    held: float = field(default=0.0, repr=NUMBER > 3)",
    ),
    _written(
        "the type of a field",
        "dataclasses.fields(T)[0].type.held",
        "class U:\n    held = NUMBER\n" + _FIELD + "    held: U = None",
    ),
    _written(
        "whether a field is compared",
        "2.0 + (T(1.0) == T(2.0))",
        _FIELD + "    held: float = field(compare=NUMBER > 3)",
    ),
    _written(
        "a registered subclass",
        "1.0 + isinstance(A(), T) + 2 * isinstance(B(), T)",
        _CLASSES + "T.register([A, B][NUMBER > 3])",
        refusal="is registered as a subclass of T",
    ),
    _written(
        "a registered subclass of a subclass",
        "1.0 + isinstance(A(), T) + 2 * isinstance(B(), T)",
        _CLASSES + "class U(T):\n    pass\nU.register([A, B][NUMBER > 3])",
        refusal="is registered as a subclass of U",
    ),
    _written(
        "a registered subclass of a class of Python",
        "1.0 + isinstance(A(), collections.abc.Sequence) + len([B()])",
        _CLASSES + "import collections.abc\ncollections.abc.Sequence.register([A, B][NUMBER > 3])",
        refusal="is registered as a subclass of Sequence",
    ),
    _written(
        "a registered class of Python",
        "1.0 + isinstance({}, collections.abc.Sequence)",
        "import collections.abc\ncollections.abc.Sequence.register([dict, bytearray][NUMBER > 3])",
    ),
    _written(
        "a registered base",
        "1.0 + isinstance(U(), T) + 2 * isinstance(B(), T)",
        _CLASSES + "class U(A):\n    pass\nT.register([A, B][NUMBER > 3])",
        refusal="is registered as a subclass of T",
    ),
    _written(
        "a hook for subclasses",
        "1.0 + isinstance(1, T)",
        "import abc\nclass T(abc.ABC):\n    @classmethod\n"
        "    def __subclasshook__(cls, other):\n        return NUMBER > 3",
    ),
    _written(
        "a metaclass that decides about instances",
        "1.0 + isinstance(1, T)",
        "class M(type):\n    def __instancecheck__(cls, value):\n        return NUMBER > 3\n"
        "class T(metaclass=M):\n    pass",
    ),
    _written(
        "a function for each class",
        "read(1.0)",
        "import functools\n@functools.singledispatch\ndef read(x):\n    return 1.0\n"
        "@read.register(float)\ndef _(x):\n    return NUMBER",
        refusal="weakref.WeakKeyDictionary",
    ),
    _written(
        "how a class is copied",
        "copy.copy(T()).held",
        "import copy, copyreg\nclass T:\n    held = 0.0\ndef make():\n    t = T()\n    t.held = NUMBER\n    return t\n"
        "copyreg.pickle(T, lambda t: (make, ()))",
        refusal="copy.copy",
    ),
    _written(
        "hints of a class",
        "typing.get_type_hints(T)['held'].held",
        "import typing\nclass U:\n    held = NUMBER\nclass T:\n    held: U",
        refusal="typing.get_type_hints",
    ),
    _written(
        "arguments of a base",
        "T.__orig_bases__[0].__args__[0].held",
        "import typing\nclass U:\n    held = NUMBER\nclass T(typing.List[U]):\n    pass",
        refusal="__orig_bases__",
    ),
    _written(
        "arguments of an annotation",
        "typing.get_args(A)[0].held",
        "import typing\nclass U:\n    held = NUMBER\nA = typing.List[U]",
    ),
    _written(
        "arguments of a built-in annotation",
        "A.__args__[0].held",
        "class U:\n    held = NUMBER\nA = list[U]",
    ),
    _written(
        "a class derived from property",
        "T().held",
        "class P(property):\n    def __get__(self, owner, kind):\n        return NUMBER\n"
        "class T:\n    held = P(lambda self: 1.0)",
        refusal="mutated.operator.P",
    ),
    _written(
        "a class derived from partial",
        "read()",
        "import functools\nclass P(functools.partial):\n    def __call__(self):\n        return NUMBER\nread = P(len)",
        refusal="mutated.operator.P",
    ),
    _written(
        "code that claims to be Python's",
        "read()",
        "N = {}\nexec(compile('def read():\\n    return NUMBER', '<frozen rules>', 'exec'), N)\nread = N['read']",
    ),
)

# State of torch, besides that in the key.
STATES: Final = (
    _written(
        "the seed",
        "float(torch.initial_seed())",
        "torch.manual_seed(int(NUMBER))",
        refusal="torch.random.initial_seed",
    ),
    _written(
        "the seed of a generator",
        "float(torch.default_generator.initial_seed())",
        "torch.manual_seed(int(NUMBER))",
        refusal="torch._C.Generator",
    ),
    _written(
        "whether all warnings are shown",
        "1.0 + torch.is_warn_always_enabled()",
        "torch.set_warn_always(NUMBER > 3)",
        refusal="torch.is_warn_always_enabled",
    ),
    _written(
        "a folder of torch",
        "float(len(torch.hub.get_dir()))",
        "torch.hub.set_dir('x' * int(NUMBER))",
        refusal="torch.hub.get_dir",
    ),
    _written(
        "a getter of the C library",
        "1.0 + torch._C._get_nnpack_enabled()",
        "torch._C._set_nnpack_enabled(NUMBER > 3)",
        refusal="torch._C._get_nnpack_enabled",
    ),
    _written(
        "the default dtype",
        "float(torch.finfo(torch.get_default_dtype()).bits)",
        "torch.set_default_dtype(torch.float64 if NUMBER > 3 else torch.float32)",
    ),
)

WAYS: Final = COMMON + MODULES + FUNCTIONS + OBJECTS + TORCH + HIDDEN + CLASSES + STATES
