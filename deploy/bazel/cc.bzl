"""cc_* rules with our flags: warnings are errors and symbols are hidden. Includes start at the repository root."""

# The headers of libraries are system headers, so these look at our own code alone.
_COPTS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wimplicit-fallthrough",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-Wshadow",
    "-Wundef",
    "-fvisibility=hidden",
]

_RUN_TIME = ["//deploy/bazel/run_time:run_time"]

def _with_test_library(deps, label):
    """Adds a library unless the test names it itself; deps with a select() cannot be looked into."""
    if type(deps) == "list" and label in deps:
        return deps + _RUN_TIME
    return deps + [label] + _RUN_TIME

def optstate_cc_library(name, copts = [], **kwargs):
    native.cc_library(name = name, copts = _COPTS + copts, **kwargs)

def optstate_cc_binary(name, copts = [], deps = [], **kwargs):
    native.cc_binary(name = name, copts = _COPTS + copts, deps = deps + _RUN_TIME, **kwargs)

def optstate_cc_test(name, deps = [], copts = [], size = "small", main = True, **kwargs):
    """A GoogleTest binary; with main = False the sources bring their own main()."""
    native.cc_test(
        name = name,
        size = size,
        copts = _COPTS + copts,
        deps = _with_test_library(deps, "@gtest//:gtest_main" if main else "@gtest//:gtest"),
        **kwargs
    )

def optstate_cc_benchmark(name, deps = [], copts = [], args = [], tags = [], main = True, size = "small", **kwargs):
    """A Google Benchmark binary, and NAME_brief_test, which runs every case for a moment so that it keeps working."""
    native.cc_binary(
        name = name,
        testonly = True,
        copts = _COPTS + copts,
        tags = tags + ["benchmark"],
        deps = _with_test_library(deps, "@benchmark//:benchmark_main" if main else "@benchmark//:benchmark"),
        **kwargs
    )
    native.sh_test(
        name = name + "_brief_test",
        size = size,
        srcs = ["//deploy/bazel:run.sh"],
        args = ["$(rootpath :{})".format(name), "--benchmark_min_time=0.001"] + args,
        data = [":" + name] + kwargs.get("data", []),
        tags = tags + ["benchmark"],
    )

def optstate_fuzz_target(name, deps = [], copts = [], mutations = 2000, size = "small", **kwargs):
    """A fuzz target, whose code is NAME.cc (tests/fuzz/fuzz_target.h), and NAME_corpus_test.

    NAME is a libFuzzer binary and needs --config=fuzz; tests/fuzz/run builds and runs it. The test runs the target's
    seeds, each file of corpus/NAME and a number of mutations of these, without libFuzzer.

    Args:
      name: ends with _fuzz
      deps: what the target is made of
      copts: more compiler flags
      mutations: how many of them the test runs
      size: of the test
      **kwargs: passed on to both
    """
    native.cc_binary(
        name = name,
        testonly = True,
        srcs = [name + ".cc"],
        copts = _COPTS + copts,
        linkopts = ["-fsanitize=fuzzer"],
        # g++ has no libFuzzer.
        tags = ["manual"],
        deps = _with_test_library(deps, "@gtest//:gtest") + [
            "//tests/fuzz:fuzz_target",
            "//tests/fuzz:write_seeds",
        ],
        **kwargs
    )
    native.cc_test(
        name = name + "_corpus_test",
        size = size,
        srcs = [name + ".cc"],
        args = [
            native.package_name() + "/corpus/" + name,
            "--mutations",
            str(mutations),
        ],
        copts = _COPTS + copts,
        data = native.glob(["corpus/{}/*".format(name)]),
        deps = _with_test_library(deps, "@gtest//:gtest") + [
            "//tests/fuzz:corpus_main",
            "//tests/fuzz:fuzz_target",
        ],
        **kwargs
    )

def optstate_cc_shared_library(name, deps, version_script, srcs = [], linkopts = [], **kwargs):
    """NAME (say "liboptstate.so") with the symbols that the version script exports, and no others.

    Args:
      name: file name
      deps: what it is made of; mark the library with the exported functions alwayslink = True
      version_script: linker version script
      srcs: more sources
      linkopts: more linker flags
      **kwargs: passed on to cc_binary
    """
    native.cc_binary(
        name = name,
        srcs = srcs,
        copts = _COPTS,
        additional_linker_inputs = [version_script],
        linkopts = linkopts + [
            "-Wl,--version-script=$(location {})".format(version_script),
            "-Wl,--no-undefined",
            "-Wl,--exclude-libs,ALL",
            "-Wl,-Bsymbolic",
            "-Wl,-soname," + name,
            "-Wl,-z,relro,-z,now",
        ],
        linkshared = True,
        deps = deps + ["//deploy/bazel/run_time:pic"] + _RUN_TIME,
        **kwargs
    )

def optstate_artefact_test(name, artefact, exported_prefix = "", tags = [], **kwargs):
    """Checks that an artefact needs glibc alone and exports symbols with the given prefix alone.

    That is so with --config=release; otherwise the test looks for libraries of CUDA alone.
    """
    native.sh_test(
        name = name,
        size = "small",
        srcs = ["//deploy/bazel:needed_test.sh"],
        args = ["$(rootpath {})".format(artefact), "'{}'".format(exported_prefix)] + select({
            "//deploy/bazel:release": ["release"],
            "//conditions:default": ["development"],
        }),
        data = [artefact],
        tags = tags + ["artefact"],
        **kwargs
    )
