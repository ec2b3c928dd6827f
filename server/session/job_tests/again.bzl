"""again: starts tests that there are once more, in another environment."""

def again(suffix, env, tests):
    """Makes TEST_SUFFIX of each test.

    Args:
      suffix: of the new names.
      env: the environment variables that ask for something else.
      tests: by name, the cases to leave out, as --gtest_filter has them; "": none.
    """
    for test, without in tests.items():
        native.sh_test(
            name = test + "_" + suffix,
            size = "medium",
            srcs = ["//deploy/bazel:run.sh"],
            args = ["$(rootpath :{})".format(test)],
            data = [":" + test],
            env = dict(env, GTEST_FILTER = "-" + without),
        )
