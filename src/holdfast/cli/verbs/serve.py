"""The verb `serve`: shows a store in a browser, until it is interrupted."""

from __future__ import annotations

import webbrowser
from argparse import ArgumentParser, Namespace

from holdfast.cli.lookup import open_to_read
from holdfast.cli.output import Output
from holdfast.cli.verb import add_json, document
from holdfast.serving.server import DEFAULT_HOST, StoreServer
from holdfast.texts import parse_duration


def declare_serve(parser: ArgumentParser) -> None:
    """Declare the verb `serve`."""
    more = (
        "Prints the address of a page that shows snapshots, their tensors, and what\n"
        "changed between two of them, and opens it if there is a desktop. Only reads the\n"
        "store. The address contains a token, which lets anyone who knows it read the\n"
        "store while this server runs. Ends with Ctrl-C, or with --timeout.\n\n"
        "Only programs on this machine can reach it. To look at a store on another\n"
        "machine, run it there with --port 8080 --no-browser, and forward the port with\n"
        "`ssh -L 8080:127.0.0.1:8080 MACHINE`. With --host, others on the network can\n"
        "reach it as well, and the connection is not encrypted."
    )
    document(parser, more, examples=["holdfast serve", "holdfast -s ckpts serve --port 8080 --no-browser"])
    parser.add_argument(
        "--port", metavar="N", type=int, default=0, help="the port to listen on (default: any free one)"
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address, and open no browser")
    parser.add_argument(
        "--host", metavar="ADDRESS", default=DEFAULT_HOST, help=f"the address to listen on (default: {DEFAULT_HOST})"
    )
    parser.add_argument("--timeout", metavar="AGE", help="end after this time without a request, such as 30m")
    add_json(parser, "print the address as JSON")
    parser.set_defaults(run_verb=run_serve)


def run_serve(options: Namespace, url: str, output: Output) -> int:
    """Print the address, and answer requests until the time is up or the user interrupts."""
    idle_s = None if options.timeout is None else parse_duration(options.timeout)
    repo = open_to_read(url, output)
    with StoreServer(repo, host=options.host, port=options.port) as server:
        server.start()
        if options.json:
            output.json_line({"store": repo.store.url, "url": server.url})
        else:
            output.line(server.url)
            output.note(f"this address shows {repo.store.url}; Ctrl-C ends the server")
        output.flush()
        if _has_desktop(options) and not options.no_browser:
            webbrowser.open(server.url)
        try:
            server.wait(idle_s=idle_s)
        except KeyboardInterrupt:
            output.note("the server has ended")
    return 0


def _has_desktop(options: Namespace) -> bool:
    """Return whether a browser can open a window: without one, Python would start a browser in the terminal."""
    return bool(options.variables.get("DISPLAY") or options.variables.get("WAYLAND_DISPLAY"))
