package roostream;

import org.apache.flink.api.common.functions.FilterFunction;
import org.apache.flink.types.Row;

/** Drops what has done its work once the watermark generator has seen it: heartbeats and end markers (roo/wire.py). */
public final class EventFilter implements FilterFunction<Row> {
    private static final long serialVersionUID = 1L;
    private static final int HEARTBEAT = 6;
    private static final int END_MARKER = 7;

    @Override
    public boolean filter(Row row) {
        int kind = Envelope.kindOf((byte[]) row.getField(1));
        return kind != HEARTBEAT && kind != END_MARKER;
    }
}
