package roostream;

import java.util.HashMap;
import java.util.Map;
import org.apache.flink.api.common.eventtime.Watermark;
import org.apache.flink.api.common.eventtime.WatermarkGenerator;
import org.apache.flink.api.common.eventtime.WatermarkGeneratorSupplier;
import org.apache.flink.api.common.eventtime.WatermarkOutput;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.types.Row;

/** Event time of each partition, by the rules of PartitionTime in joiner/local_engine.py; a test compares the two. */
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
        private static final long START = Long.MIN_VALUE;
        private static final long NEVER = Long.MAX_VALUE;
        private long newestMs = START;
        private long unconfirmedMs = NEVER;
        private final Map<String, Long> heartbeats = new HashMap<>();

        @Override
        public void onEvent(Row row, long timestamp, WatermarkOutput output) {
            observe(TimeSignal.of((byte[]) row.getField(1)));
        }

        @Override
        public void onPeriodicEmit(WatermarkOutput output) {
            long reachedMs = reachedMs();
            if (reachedMs != START) {
                output.emitWatermark(new Watermark(reachedMs - latenessMs - 1));
            }
        }

        void observe(TimeSignal signal) {
            switch (signal.kind) {
                case EVENT -> event(signal.timeMs);
                case HEARTBEAT -> heartbeat(signal.timeMs, signal.producer);
                case END_MARKER -> {
                    newestMs = Math.max(newestMs, signal.timeMs);
                    heartbeats.clear();
                }
                default -> { }
            }
        }

        long reachedMs() {
            long slowest = NEVER;
            int live = 0;
            for (long ms : heartbeats.values()) {
                if (ms >= newestMs - producerTimeoutMs) {
                    slowest = Math.min(slowest, ms);
                    live++;
                }
            }
            return live > 1 ? slowest : newestMs;
        }

        private void event(long timeMs) {
            boolean isJump = newestMs != START && timeMs > newestMs + maxStepMs;
            if (isJump && unconfirmedMs == NEVER) {
                unconfirmedMs = timeMs;
                return;
            }
            newestMs = Math.max(newestMs, isJump ? Math.min(timeMs, unconfirmedMs) : timeMs);
            unconfirmedMs = timeMs > newestMs + maxStepMs ? timeMs : NEVER;
        }

        private void heartbeat(long timeMs, String producer) {
            newestMs = Math.max(newestMs, timeMs);
            if (!producer.isEmpty()) {
                heartbeats.merge(producer, timeMs, Math::max);
            }
            heartbeats.values().removeIf(ms -> ms < newestMs - producerTimeoutMs);
        }
    }
}
