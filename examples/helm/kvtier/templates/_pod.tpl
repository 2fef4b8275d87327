{{/* Of every pod's spec. "serviceAccountName" is the pod's own, or that of all. */}}
{{- define "kvtier.pod" }}
{{- with .images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - {name: {{ . }}}
{{- end }}
{{- end }}
{{- with .serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- end }}
