"""Triton's interpreter in less time, with the same results: for servers and tests on a machine without a GPU.

A program's arithmetic is NumPy's and takes little; most of the time goes into Triton's front end, which runs again for
every operation of every program. So here are short cuts for what comes again and again: the names of
``triton.language`` that are replaced for each launch and each device function, the types of results, and operands that
need no conversion. Whatever else there is goes Triton's own way.
"""

from __future__ import annotations

import functools
import inspect
import math
import os


def turn_on() -> None:
    """Interpret this process's kernels, here. Before the first ``import triton``."""
    os.environ["TRITON_INTERPRET"] = "1"
    patch()


def patch() -> None:
    """Once per process, with ``TRITON_INTERPRET=1``; again does nothing. Another build is left alone."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = ("_patch_lang", "_get_np_dtype", "_LangPatchScope")
    if not all(hasattr(interpreter, name) for name in names) or hasattr(interpreter._patch_lang, "once"):
        return
    patch_languages = interpreter._patch_lang
    languages = (tl, tl.core)
    patched: set[int] = set()  # by the launch that runs: places in ``languages``

    @functools.cache
    def languages_of(function) -> frozenset[int]:
        names = function.__globals__.values()
        return frozenset(place for place, language in enumerate(languages) if any(name is language for name in names))

    def patch_languages_once(function):
        needed = languages_of(function)
        if needed and needed <= patched:
            return interpreter._LangPatchScope()
        outermost = not patched
        scope = patch_languages(function)
        patched.update(needed)
        if outermost:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    numpy_dtype = interpreter._get_np_dtype
    numpy_dtype_of_scalar = functools.cache(numpy_dtype)

    def numpy_dtype_cached(dtype):
        """A block's is that of its elements; pointers cannot be hashed, and have no table."""
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return numpy_dtype(element) if isinstance(element, tl.pointer_type) else numpy_dtype_of_scalar(element)

    patch_languages_once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_languages_once
    interpreter._get_np_dtype = numpy_dtype_cached
    _replace_names_quickly()
    _describe_types_once()
    _convert_operands_quickly()


def _replace_names_quickly() -> None:
    """A launch looks once for the builtins of a module or class, and its calls of them go through one function less."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    checked = tl.core.builtin(lambda: None).__code__  # what a builtin is wrapped in: looks for ``_semantic``
    semantic = TritonSemantic(interpreter.interpreter_builder)
    builtins_of: dict[int, list] = {}

    def patch_builtins(package, builder, scope) -> None:
        if id(package) not in builtins_of:
            members = inspect.getmembers(package)
            builtins_of[id(package)] = [(name, one) for name, one in members if tl.core.is_builtin(one)]
        for name, member in builtins_of[id(package)]:
            scope.set_attr(package, name, with_semantic(member))

    @functools.cache
    def with_semantic(member):
        function = member.__wrapped__ if member.__code__ is checked else member

        def called(*arguments, **named):
            named["_semantic"] = semantic
            return function(*arguments, **named)

        return called

    interpreter._patch_builtin = patch_builtins


def _describe_types_once() -> None:
    """The type and the shape of a result are one of few."""
    import triton.language as tl
    from triton.runtime import interpreter

    describe_block, with_element_type, block_to_ir, handle_check, unwrap = (
        tl.block_type.__init__,
        tl.block_type.with_element_ty,
        tl.block_type.to_ir,
        interpreter.TensorHandle.__post_init__,
        tl.core._unwrap_if_constexpr,
    )
    types_equal, tuples_equal = tl.dtype.__eq__, tl.tuple.__eq__
    unwrapped = frozenset((bool, int, float, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type))
    known: dict = {}
    of_a_scalar = tl.tuple([]), tl.constexpr(1)

    def shape_and_size(type):
        sizes = type.shape.values
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def describe_tensor(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.__class__ is tl.block_type:
            self.shape, self.numel = getattr(type, "shape_and_size", None) or shape_and_size(type)
        else:
            self.shape, self.numel = of_a_scalar

    def describe_block_once(self, element_ty, shape) -> None:
        if isinstance(element_ty, tl.pointer_type):  # has no hash
            describe_block(self, element_ty, shape)
            return
        key = element_ty.name, *shape
        fields = known.get(key)
        if fields is None:
            describe_block(self, element_ty, shape)
            self.shape_and_size = shape_and_size(self)
            self.with_others = {}
            known[key] = dict(vars(self))
            return
        self.__dict__.update(fields)

    def with_element_type_once(self, scalar_ty):
        others = getattr(self, "with_others", None)
        if others is None or isinstance(scalar_ty, tl.pointer_type):
            return with_element_type(self, scalar_ty)
        if scalar_ty.name not in others:
            others[scalar_ty.name] = with_element_type(self, scalar_ty)
        return others[scalar_ty.name]

    def block_is_its_ir(self, builder):
        is_so = builder is interpreter.interpreter_builder and not isinstance(self.element_ty, tl.pointer_type)
        return self if is_so else block_to_ir(self, builder)

    def unwrap_quickly(value):
        return value if value.__class__ in unwrapped else unwrap(value)

    def check_handle(self) -> None:
        if self.dtype.__class__ is not tl.dtype or self.data.itemsize * 8 > self.dtype.primitive_bitwidth:
            handle_check(self)

    tl.tensor.__init__, tl.block_type.__init__ = describe_tensor, describe_block_once
    tl.block_type.with_element_ty, tl.block_type.to_ir = with_element_type_once, block_is_its_ir
    tl.core._unwrap_if_constexpr = unwrap_quickly
    interpreter.TensorHandle.__post_init__ = check_handle
    tl.dtype.__eq__ = lambda self, other: self is other or types_equal(self, other)
    tl.tuple.__eq__ = lambda self, other: tl.constexpr(True) if self is other else tuples_equal(self, other)


def _convert_operands_quickly() -> None:
    """Two operands of one type stay as they are, and a number takes the type of the tensor beside it."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    check_operands, broadcast, splat, cast, check_overflow = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
        TritonSemantic.splat,
        TritonSemantic.cast,
        TritonSemantic.binary_op_sanitize_overflow_impl,
    )
    integers = (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
    # Keys are identities: the hash of a type costs more than all the rest.
    bounds = {id(one): (one.get_int_min_value(), one.get_int_max_value()) for one in integers}
    floats = {id(tl.float32), id(tl.float64)}
    kept = {id(tl.int1), *floats, *bounds}

    def takes_number(dtype, number) -> bool:
        """True if a Python ``number`` becomes a ``dtype`` beside a tensor of that dtype."""
        if number.__class__ is int:
            least, most = bounds.get(id(dtype), (-(2**63), 2**63 - 1) if id(dtype) in floats else (1, 0))
            return least <= number <= most
        return number.__class__ is float and id(dtype) in floats

    @functools.wraps(check_operands)
    def check_operands_quickly(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        if lhs.__class__ is tl.tensor:
            dtype = lhs.dtype
            if rhs.__class__ is tl.tensor:
                if dtype is rhs.dtype and id(dtype) in kept:
                    return broadcast_quickly(self, lhs, rhs)
            elif arithmetic_check and takes_number(dtype, rhs):
                return broadcast_quickly(self, lhs, self.scalar_constant(rhs, dtype))
        elif rhs.__class__ is tl.tensor and arithmetic_check and takes_number(rhs.dtype, lhs):
            return broadcast_quickly(self, self.scalar_constant(lhs, rhs.dtype), rhs)
        return check_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    @functools.wraps(broadcast)
    def broadcast_quickly(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.__class__ is tl.block_type:
            if right.__class__ is not tl.block_type:
                return lhs, splat_as(self, rhs, left)
            return (lhs, rhs) if left.shape.values == right.shape.values else broadcast(self, lhs, rhs)
        return (splat_as(self, lhs, right), rhs) if right.__class__ is tl.block_type else (lhs, rhs)

    def splat_as(self, value, block):
        result = block.with_element_ty(value.dtype)
        return self.tensor(self.builder.create_splat(result, value.handle), result)

    @functools.wraps(splat)
    def splat_quickly(self, value, shape):
        if value.type.is_block() or len(shape) == 0:
            return splat(self, value, shape)
        return splat_as(self, value, tl.block_type(value.dtype, shape))

    @functools.wraps(cast)
    def cast_quickly(self, input, dst_ty, *arguments, **named):
        return input if input.dtype is dst_ty.scalar else cast(self, input, dst_ty, *arguments, **named)

    def check_overflow_where_it_is_told(self, *arguments) -> None:
        if self.builder.options.debug:
            check_overflow(self, *arguments)

    TritonSemantic.binary_op_type_checking_impl = check_operands_quickly
    TritonSemantic.broadcast_impl_value, TritonSemantic.splat = broadcast_quickly, splat_quickly
    TritonSemantic.cast = cast_quickly
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow_where_it_is_told
