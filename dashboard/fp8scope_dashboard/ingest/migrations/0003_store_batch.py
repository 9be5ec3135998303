"""The function that stores a batch, so that one statement does it where the rows of the run are.

As one statement with parts that write, it is planned part by part over all nodes of a distributed store. A
changed function gets another name: servers of the former version may go on to call this one.
"""

from django.db import migrations

# The order of the locks is that of all code: receipt, writer, run. LEAST and GREATEST ignore NULL. Times are
# variables, because no UPDATE of a distributed table may contain a clock; the writer and the run are locked late,
# and another message may have been later still.
CREATE = """
CREATE FUNCTION fp8scope_store_batch(
    of_run uuid, of_writer uuid, of_writer_id bigint, new_seq bigint, new_kind text, new_digest bytea,
    new_first bigint, new_last bigint, new_rows bigint, new_points bigint, new_body bytea, new_head integer,
    new_scalars jsonb, new_statistics text[]
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    moment timestamptz := clock_timestamp();
BEGIN
    INSERT INTO ingest_receipt (run_id, writer, seq, kind, digest, received_at)
    VALUES (of_run, of_writer, new_seq, new_kind, new_digest, moment)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO telemetry_chunk
        (run_id, writer, seq, last_seq, first_step, last_step, rows, points, body, head, received_at)
    VALUES (of_run, of_writer, new_seq, new_seq, new_first, new_last, new_rows, new_points, new_body, new_head,
        moment);
    moment := clock_timestamp();
    UPDATE runs_writer SET
        seen_at = greatest(seen_at, moment),
        first_step = least(first_step, new_first),
        last_step = greatest(last_step, new_last)
    WHERE run_id = of_run AND id = of_writer_id;
    UPDATE runs_run SET
        heartbeat_at = greatest(heartbeat_at, moment),
        state = CASE WHEN state = 'silent' THEN 'running' ELSE state END,
        rows_stored = rows_stored + new_rows,
        points_stored = points_stored + new_points,
        last_step = greatest(last_step, new_last),
        last_scalars = CASE WHEN last_step > new_last THEN new_scalars || last_scalars
            ELSE last_scalars || new_scalars END,
        statistics = statistics || ARRAY(
            SELECT name FROM unnest(new_statistics) WITH ORDINALITY AS sent (name, position)
            WHERE name <> ALL (statistics) ORDER BY position)
    WHERE id = of_run;
    RETURN true;
END
$$
"""


class Migration(migrations.Migration):
    # By the names that each app's 0001_schema replaces: an upgrade from a database of version 0.1 has both.
    dependencies = [
        ("receipts", "0001_receipt"),
        ("runs", "0016_run_order"),
        ("telemetry", "0005_chunk_head"),
    ]

    operations = [migrations.RunSQL(CREATE, "DROP FUNCTION fp8scope_store_batch")]
