"""cc_* rules with our flags: warnings are errors and symbols are hidden. Includes start at the repository root."""

# -Wshadow and the like stay out of system headers, which the compiler knows to be none of ours.
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

def optstate_cc_library(name, copts = [], **kwargs):
    native.cc_library(name = name, copts = _COPTS + copts, **kwargs)

def optstate_cc_binary(name, copts = [], **kwargs):
    native.cc_binary(name = name, copts = _COPTS + copts, **kwargs)

def optstate_cc_test(name, deps = [], copts = [], size = "small", main = True, **kwargs):
    """A GoogleTest binary; set main = False when srcs define main() themselves."""
    gtest = "@gtest//:gtest_main" if main else "@gtest//:gtest"
    native.cc_test(
        name = name,
        size = size,
        copts = _COPTS + copts,
        deps = deps + ([] if gtest in deps else [gtest]),
        **kwargs
    )
