package roostream;

import org.apache.flink.api.common.eventtime.Watermark;
import org.apache.flink.api.common.eventtime.WatermarkGenerator;
import org.apache.flink.api.common.eventtime.WatermarkGeneratorSupplier;
import org.apache.flink.api.common.eventtime.WatermarkOutput;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.types.Row;

/**
 * Event time of each partition, by the rules of PartitionTime in joiner/local_engine.py; a test compares the two. Flink keeps no
 * state of a watermark generator: EventTimeKeeper, in the chain of each source, stores it.
 */
public final class EventTime implements WatermarkStrategy<Row> {
    private static final long serialVersionUID = 1L;
    private final long latenessMs;
    private final long maxStepMs;
    private final long producerTimeoutMs;

    /** All in ms of event time: maximum disorder, largest step by one event, timeout of a silent producer. */
    public EventTime(long latenessMs, long maxStepMs, long producerTimeoutMs) {
        this.latenessMs = latenessMs;
        this.maxStepMs = maxStepMs;
        this.producerTimeoutMs = producerTimeoutMs;
    }

    @Override
    public WatermarkGenerator<Row> createWatermarkGenerator(WatermarkGeneratorSupplier.Context context) {
        return new Split();
    }

    /** One partition. */
    final class Split implements WatermarkGenerator<Row> {
        private PartitionTime time;

        @Override
        public void onEvent(Row row, long timestamp, WatermarkOutput output) {
            byte[] in = (byte[]) row.getField(1);
            if (time == null) { // only a record says which partition this is
                time = PartitionTime.ofTask(Envelope.partitionOf(in));
            }
            time.offset = Envelope.offsetOf(in);
            observe(time, TimeSignal.of(in));
        }

        @Override
        public void onPeriodicEmit(WatermarkOutput output) {
            long reachedMs = time == null ? PartitionTime.START : time.reachedMs(producerTimeoutMs);
            if (reachedMs != PartitionTime.START) {
                output.emitWatermark(new Watermark(reachedMs - latenessMs - 1));
            }
        }
    }

    void observe(PartitionTime time, TimeSignal signal) {
        switch (signal.kind) {
            case EVENT -> time.event(signal.timeMs, maxStepMs);
            case HEARTBEAT -> time.heartbeat(signal.timeMs, signal.producer, producerTimeoutMs);
            case END_MARKER -> time.endMarker(signal.timeMs);
            default -> { }
        }
    }
}
