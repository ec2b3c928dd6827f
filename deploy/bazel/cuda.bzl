"""optstate_cuda_library: CUDA C++ compiled by nvcc, with and without a toolkit on the machine.

--//:cuda=auto (default) compiles device code where a CUDA Toolkit is found, `on` fails without one, and
`off` compiles none. Where none is compiled the library is empty: use if_cuda() for what needs it.
"""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@cuda//:defs.bzl", "FOUND", "HOME", "PLACES", "VERSION")

# Machine code for these, and PTX of the last one for later devices.
ARCHITECTURES = ["80", "90", "100"]

# The bits of a result do not depend on the device: no contraction, IEEE division and square root,
# no flush to zero. Assertions are off, as in all our builds.
_NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-fmad=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-ftz=false",
    "--expt-relaxed-constexpr",
    "-Werror=all-warnings",
]
_HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]

def if_cuda(yes, no = []):
    """Selects `yes` where device code is compiled."""
    return select({
        "@optstate//:cuda_off": no,
        "@optstate//:cuda_on": yes,
        "//conditions:default": yes if FOUND else no,
    })

def _nvcc(ctx, source, headers, includes, output, arguments, what):
    args = ctx.actions.args()
    args.add_all(_NVCC_FLAGS)
    for flag in _HOST_FLAGS:
        args.add("-Xcompiler", flag)
    args.add_all(includes, before_each = "-I")
    args.add_all(arguments)
    args.add("-o", output)
    args.add(source)
    ctx.actions.run(
        executable = HOME + "/bin/nvcc",
        arguments = [args],
        inputs = depset([source], transitive = [headers]),
        outputs = [output],
        # nvcc looks for the host's compiler on PATH.
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OPTSTATE_CUDA_VERSION": VERSION},
        mnemonic = "Nvcc",
        progress_message = "Compiling {} ({})".format(source.short_path, what),
    )
    return output

def _code_of(architecture):
    return "-gencode=arch=compute_{0},code=sm_{0}".format(architecture)

def _cuda_library_impl(ctx):
    setting = ctx.attr._cuda[BuildSettingInfo].value
    if setting == "on" and not FOUND:
        fail("--//:cuda=on, and there is no CUDA Toolkit in {}: install one, or set CUDA_HOME".format(PLACES))
    if setting == "off" or not FOUND:
        return [CcInfo(), DefaultInfo(), OutputGroupInfo(ptx = depset())]

    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    headers = depset(ctx.files.hdrs, transitive = [context.headers])
    includes = depset(["."], transitive = [context.includes, context.quote_includes, context.system_includes])
    last = ARCHITECTURES[-1]
    code = [_code_of(architecture) for architecture in ARCHITECTURES]
    code.append("-gencode=arch=compute_{0},code=compute_{0}".format(last))
    objects, ptx = [], []
    for source in ctx.files.srcs:
        stem = source.basename[:-len(".cu")]
        declared = ctx.actions.declare_file("_nvcc/{}/{}.pic.o".format(ctx.label.name, stem))
        objects.append(_nvcc(ctx, source, headers, includes, declared, code + ["-c"], "machine code"))
        declared = ctx.actions.declare_file("_nvcc/{}/{}.ptx".format(ctx.label.name, stem))
        first = "-arch=compute_" + ARCHITECTURES[0]
        ptx.append(_nvcc(ctx, source, headers, includes, declared, [first, "-ptx"], "PTX"))

    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    linking, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        linking_contexts = [dep[CcInfo].linking_context for dep in ctx.attr.deps],
        disallow_dynamic_library = True,
    )
    own = cc_common.create_compilation_context(headers = depset(ctx.files.hdrs))
    info = cc_common.merge_cc_infos(
        direct_cc_infos = [CcInfo(compilation_context = own, linking_context = linking)],
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    )
    return [info, DefaultInfo(files = depset(objects)), OutputGroupInfo(ptx = depset(ptx))]

optstate_cuda_library = rule(
    implementation = _cuda_library_impl,
    doc = "A cc_library of .cu files. The output group `ptx` has their PTX, for tests that read it.",
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"], mandatory = True),
        "hdrs": attr.label_list(allow_files = [".h"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_cuda": attr.label(default = "@optstate//:cuda"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
