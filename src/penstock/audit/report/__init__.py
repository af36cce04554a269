"""The report of an audit: one HTML page that needs nothing else.

No script, no font, no image, no network: it can be mailed, kept for years, printed, and opened where nothing may be
loaded. Every text that is not ours is escaped. What colours say, words and patterns say as well; light and dark follow
the reader's system, and the page is as wide as a phone or as a sheet of paper.

`page` puts it together; `sections` are its parts, `charts` its pictures, `pieces` how single values are written, and
`style` is all there is of CSS.
"""
