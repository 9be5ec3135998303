"""The server of `fp8scope mcp`: what the pages show, as tools of the Model Context Protocol. See docs/mcp.md.

It needs the package mcp: pip install 'fp8scope[mcp]'.
"""
