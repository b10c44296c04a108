"""Between nodes: links, lanes and what goes over them; see docs/collectives.md."""
