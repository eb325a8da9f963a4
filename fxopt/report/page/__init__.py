"""The parts of the HTML report: what goes into it (data, words), and page.html, page.css and the scripts."""
