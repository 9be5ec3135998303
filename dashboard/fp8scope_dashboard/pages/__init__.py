"""The pages in the browser: views, figures, templates."""
