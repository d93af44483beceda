"""One page about a run, as Markdown and as self-contained HTML.

``facts``    gathers what the manifests, metrics and results of a run say
``plots``    curves as SVG (matplotlib)                                          ``blocks``  facts -> page
``ranking``  the drafters of a run file, best first                             ``several`` the page of several drafters
``page``     the page as Markdown and as HTML
``live``     the numbers of a run while it goes on                               ``prometheus``  the same as Prometheus reads them
``serving``  the live page, ``dflash-offline report --serve``
``stage``    ``python -m dflash_offline.report``
"""

from dflash_offline.report.stage import main, write_report

__all__ = ["main", "write_report"]
