"""The process that runs a page's Python blocks. In: one JSON object per line on stdin: page, line,
source. Out: one JSON line per block on the descriptor in argv[1]: the traceback, empty where all went well.

It is started as `python -c THIS`, so that the page's folder is the first place to import from and blocks
run in `__main__`."""


def _serve():
    import json
    import os
    import sys
    import traceback

    import __main__

    replies = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    orders, sys.stdin = sys.stdin, open(os.devnull)  # noqa: SIM115
    del __main__._serve
    for order in orders:
        block = json.loads(order)
        said = ""
        try:
            exec(
                compile("\n" * block["line"] + block["source"], block["page"], "exec", dont_inherit=True),
                __main__.__dict__,
            )
        except BaseException:  # SystemExit too: the page's session would be over
            said = traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        print(json.dumps(said), file=replies, flush=True)


_serve()
