"""debian_source: files of a Debian source package, as deploy/setup put them into the user's cache.

A repository with a `build_file` is a library that has no archive in Debian, and that every build compiles
(library_sources/). The files of the others are for few targets (run_time/); `:headers` has the headers among them.
"""

_FILES_ALONE = """
package(default_visibility = ["//visibility:public"])

exports_files(glob(["**/*.cc"]))

cc_library(
    name = "headers",
    hdrs = glob(["**/*.h"]),
)
"""

def _version_define(ctx, version):
    """A define that changes with the package, whose headers below /usr/include Bazel does not look at."""
    version = "".join([c if c.isalnum() else "_" for c in version.elems()])
    return "OPTSTATE_{}_PACKAGE=_{}".format(ctx.name.upper(), version)

def _debian_source_impl(ctx):
    result = ctx.execute(["dpkg-query", "--show", "--showformat=${source:Version}", ctx.attr.package])
    cache = ctx.os.environ.get("XDG_CACHE_HOME") or ctx.os.environ.get("HOME", "") + "/.cache"
    version = result.stdout.strip()
    folder = "{}/optstate/sources/{}-{}".format(cache, ctx.attr.source, version)
    if result.return_code != 0 or not ctx.path(folder).exists:
        fail(("The sources of {} ({}) are needed here and are not in {}: " +
              "run deploy/setup, or deploy/bazel/debian_sources alone").format(ctx.attr.source, ctx.attr.package, folder))

    # A copy: the cache may be deleted at any time.
    result = ctx.execute(["cp", "--recursive", folder + "/.", "."])
    if result.return_code != 0:
        fail(result.stderr)
    if ctx.attr.build_file:
        ctx.template("BUILD.bazel", ctx.attr.build_file, substitutions = {"{version}": _version_define(ctx, version)})
    else:
        ctx.file("BUILD.bazel", _FILES_ALONE)

debian_source = repository_rule(
    implementation = _debian_source_impl,
    attrs = {
        "build_file": attr.label(doc = "the repository's BUILD file; none: the files alone"),
        "package": attr.string(mandatory = True, doc = "the installed package whose version is needed"),
        "source": attr.string(mandatory = True, doc = "the source package"),
    },
    environ = ["HOME", "XDG_CACHE_HOME"],
    local = True,
)
