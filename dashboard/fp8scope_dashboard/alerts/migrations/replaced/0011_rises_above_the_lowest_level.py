from django.db import migrations

KINDS = ("saturation_rise", "underflow_rise")
# `z` counted deviations above an average; it now counts falls above the lowest level, which are smaller.
OLD_DEFAULT, NEW_DEFAULT, LARGEST = 8.0, 11.0, 100.0


def scale_limits(apps, factor):
    for rule in apps.get_model("alerts", "Rule").objects.filter(kind__in=KINDS, parameters__has_key="z"):
        z = min(LARGEST, rule.parameters["z"] * factor)
        rule.parameters = {**rule.parameters, "z": z}
        rule.save(update_fields=["parameters"])


def forwards(apps, schema_editor):
    """Give rules of rises the limit that is as strict as theirs was. Rules store the defaults too."""
    scale_limits(apps, NEW_DEFAULT / OLD_DEFAULT)


def backwards(apps, schema_editor):
    scale_limits(apps, OLD_DEFAULT / NEW_DEFAULT)


class Migration(migrations.Migration):
    dependencies = [("alerts", "0010_reason_worse")]
    operations = [migrations.RunPython(forwards, backwards)]
