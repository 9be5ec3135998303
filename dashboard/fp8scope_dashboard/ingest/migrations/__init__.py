"""This app has no tables: receipts has had them since the migrations in replaced/, which receipts' 0001_schema replaces."""

__path__.append(f"{__path__[0]}/replaced")
