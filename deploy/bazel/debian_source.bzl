"""debian_source: files of a Debian source package, as deploy/setup put them into the user's cache.

Few targets need them (see run_time/); all others build without. `:headers` has the headers among them.
"""

def _debian_source_impl(ctx):
    result = ctx.execute(["dpkg-query", "--show", "--showformat=${source:Version}", ctx.attr.package])
    cache = ctx.os.environ.get("XDG_CACHE_HOME") or ctx.os.environ.get("HOME", "") + "/.cache"
    folder = "{}/optstate/sources/{}-{}".format(cache, ctx.attr.source, result.stdout.strip())
    if result.return_code != 0 or not ctx.path(folder).exists:
        fail(("The sources of {} ({}) are needed here and are not in {}: " +
              "run deploy/setup, or deploy/bazel/debian_sources alone").format(ctx.attr.source, ctx.attr.package, folder))

    # A copy: the cache may be deleted at any time.
    result = ctx.execute(["cp", "--recursive", folder + "/.", "."])
    if result.return_code != 0:
        fail(result.stderr)
    ctx.file("BUILD.bazel", """
package(default_visibility = ["//visibility:public"])

exports_files(glob(["**/*.cc"]))

cc_library(
    name = "headers",
    hdrs = glob(["**/*.h"]),
)
""")

debian_source = repository_rule(
    implementation = _debian_source_impl,
    attrs = {
        "package": attr.string(mandatory = True, doc = "the installed package whose version is needed"),
        "source": attr.string(mandatory = True, doc = "the source package"),
    },
    environ = ["HOME", "XDG_CACHE_HOME"],
    local = True,
)
