package roostream;

import java.util.HashMap;
import java.util.Map;
import org.apache.flink.api.common.eventtime.Watermark;
import org.apache.flink.api.common.eventtime.WatermarkGenerator;
import org.apache.flink.api.common.eventtime.WatermarkGeneratorSupplier;
import org.apache.flink.api.common.eventtime.WatermarkOutput;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.types.Row;

/** Event time of each partition; joiner/local_watermark.py says the rules, and a test holds the two against each other. */
public final class EventTime implements WatermarkStrategy<Row> {
    private static final long serialVersionUID = 1L;
    private final long latenessMs;
    private final long mostMs;
    private final long silentMs;

    /** The bound of disorder; the largest step of one event; how long a silent producer is waited for. In ms of event time. */
    public EventTime(long latenessMs, long mostMs, long silentMs) {
        this.latenessMs = latenessMs;
        this.mostMs = mostMs;
        this.silentMs = silentMs;
    }

    @Override
    public WatermarkGenerator<Row> createWatermarkGenerator(WatermarkGeneratorSupplier.Context context) {
        return new Split();
    }

    /** Of one partition. */
    final class Split implements WatermarkGenerator<Row> {
        private static final long START = Long.MIN_VALUE;
        private static final long NEVER = Long.MAX_VALUE;
        private long newestMs = START;
        private long unconfirmedMs = NEVER;
        private final Map<String, Long> beats = new HashMap<>();

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
                case HEARTBEAT -> beat(signal.timeMs, signal.producer);
                case END_MARKER -> {
                    newestMs = Math.max(newestMs, signal.timeMs);
                    beats.clear();
                }
                default -> { }
            }
        }

        long reachedMs() {
            long slowest = NEVER;
            int live = 0;
            for (long ms : beats.values()) {
                if (ms >= newestMs - silentMs) {
                    slowest = Math.min(slowest, ms);
                    live++;
                }
            }
            return live > 1 ? slowest : newestMs;
        }

        private void event(long timeMs) {
            boolean isJump = newestMs != START && timeMs > newestMs + mostMs;
            if (isJump && unconfirmedMs == NEVER) {
                unconfirmedMs = timeMs;
                return;
            }
            newestMs = Math.max(newestMs, isJump ? Math.min(timeMs, unconfirmedMs) : timeMs);
            unconfirmedMs = timeMs > newestMs + mostMs ? timeMs : NEVER;
        }

        private void beat(long timeMs, String producer) {
            newestMs = Math.max(newestMs, timeMs);
            if (!producer.isEmpty()) {
                beats.merge(producer, timeMs, Math::max);
            }
            beats.values().removeIf(ms -> ms < newestMs - silentMs);
        }
    }
}
